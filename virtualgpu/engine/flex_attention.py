"""flex_attention: a higher-order operator, whose kernel on a GPU is compiled for it.

Numbers come from PyTorch's plain implementation, which holds all scores at once; a GPU's kernel never does. So the GPU's memory gets
the results alone, and its time is that of one kernel, by PyTorch's own count of FLOPs (`torch.utils.flop_counter`) and the share of the
blocks that its mask leaves. Called without torch.compile, a real GPU would hold the scores, too.
"""

from virtualgpu import _compat
from virtualgpu.engine import values
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.operations import tensors_of
from virtualgpu.engine.timing import Kernel
from virtualgpu.timing import attention


def backward_flops(query, key, value, *args, out_val=None) -> int:
    """What `attention.attention_backward` counts, by flex_attention's own arguments: these have no gradient in front."""
    return attention.attention_backward(None, query, key, value)


KERNELS = {
    _compat.flex.flex_attention: Kernel(_compat.flex.flex_attention, attention.attention),
    _compat.flex.flex_attention_backward: Kernel(_compat.flex.flex_attention_backward, backward_flops),
}


def run(dispatch, func, args, kwargs):
    """Carry out one of KERNELS on the GPU of its query; NotImplemented for tensors on the CPU."""
    machine, gpu = dispatch.machine, gpu_of(args[0])
    if gpu is None:
        return NotImplemented
    gpu = machine.own(gpu)
    with machine.untracked():  # closures of a mask may hold GPU tensors, which are the CPU's for as long as this lasts
        results = _compat.implementation(func)(*args, **kwargs)
        if func is _compat.flex.flex_attention and not args[6].get("OUTPUT_MAX"):
            results = (*results[:2], results[2].new_empty(0))  # the kernel leaves out what nobody asked for
        share = _share(next(arg for arg in args[3:] if isinstance(arg, tuple)))
    made = tensors_of(_flat(results), {})
    dispatch.timing.book(KERNELS[func], args[:3], args[:3], made, gpu, share)
    return results


def _share(block_mask: tuple) -> float:
    """The share of the blocks that a BlockMask (as_tuple) leaves: some of their scores, or all. 1 where a dry run does not know."""
    some, indices, full = block_mask[2:5]
    counts = [some, *([] if full is None else [full])]
    if any(_compat.is_really_meta(count) and values.known_of(count) is None for count in counts):
        return 1.0
    left = sum(int((values.known_of(count) if _compat.is_really_meta(count) else count).sum()) for count in counts)
    return left / max(1, indices.numel())


def _flat(values) -> list:
    return [part for value in values for part in (_flat(value) if isinstance(value, tuple) else [value])]
