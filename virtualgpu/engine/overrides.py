"""Operations that are not like the others: what each does on virtual GPUs. Those that others wrote in Python, by torch.library; nested tensors, and flex_attention.

Each handler takes (dispatch, func, args, kwargs) and returns the operation's result; NotImplemented where it is like the others.
"""

import math

import torch
from torch import Tensor

from virtualgpu import _compat, errors
from virtualgpu.engine import attention, cuda_only_ops, rnn, values
from virtualgpu.engine.frames import warn_at_the_program
from virtualgpu.engine.operations import Operation
from virtualgpu.engine.placement import two_devices
from virtualgpu.engine.rng import as_default
from virtualgpu.engine.storage import gpu_of, gpu_of_storage, is_pinned, pin, place_output, tensors_of
from virtualgpu.engine.timing import Kernel
from virtualgpu.timing import attention as flops

aten = torch.ops.aten


def record_stream(dispatch, func, args, kwargs):
    """Tensor.record_stream. Raises NotImplementedError for the CPU's tensor, RuntimeError for one of GPUs that were replaced."""
    gpu = gpu_of(args[0])
    if gpu is None:
        raise errors.without_cpu_kernel("record_stream")
    dispatch.machine.own(gpu)
    cuda_only_ops.record_stream(*args[:2])


def answer_is_pinned(dispatch, func, args, kwargs):
    """Tensor.is_pinned: is its storage marked so? Whether C++ pinned it is not asked."""
    return is_pinned(args[0])


def pin_memory(dispatch, func, args, kwargs):
    """A copy whose storage is marked as pinned. Raises RuntimeError for a tensor on a GPU and a sparse one."""
    tensor = args[0]
    if gpu_of(tensor) is not None or tensor.layout is not torch.strided:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    with dispatch.machine.untracked():
        copy = aten.clone.default(tensor)
    pin(copy)
    return copy


def absent(dispatch, func, args, kwargs):
    """CUDA has no kernel of it."""
    if any(isinstance(value, torch.Tensor) and gpu_of(value) is not None for value in args):
        raise NotImplementedError(
            f"Could not run '{func.name()}' with arguments from the 'CUDA' backend: PyTorch has no CUDA kernel of it. "
            "Move the tensor to the CPU first"
        )
    return func(*args, **kwargs)


ABSENT = ["histogram.bin_ct", "histogram.bins_tensor", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts"]
ABSENT += ["_histogramdd_from_bin_tensors", "_spdiags", "to_mkldnn"]


def fill(dispatch, func, args, kwargs):
    """Another device's number may fill a tensor: the host reads it first."""
    tensor, value = args
    if gpu_of(tensor) is gpu_of(value) or value.dim():  # PyTorch refuses more than a number
        return NotImplemented
    if dispatch.machine.dry and func is aten.fill_.Tensor:
        known = values.known_of(value)
        with dispatch.machine.untracked():
            if known is None:
                values.invalidate([tensor], values.origin_of([value]) or "fill_")
            else:
                values.know(tensor, known.item())
        return tensor
    return (aten.fill_ if func is aten.fill_.Tensor else aten.fill).Scalar(tensor, value.item())


def unscale(dispatch, func, args, kwargs):
    """What GradScaler calls for the gradients of one GPU; unlike other lists, this one must lie on it as a whole. Raises RuntimeError."""
    devices = list(dict.fromkeys(map(gpu_of, (*args[0], *args[1:]))))
    if len(devices) > 1:
        raise two_devices(*("cpu" if gpu is None else gpu.device for gpu in devices[:2]))
    return NotImplemented


def foreach_copy(dispatch, func, args, kwargs):
    """Lists on different devices are copied one by one, as CUDA's slow path does."""
    if len({gpu_of(tensor) for tensors in args[:2] for tensor in tensors}) == 1:
        return NotImplemented
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    with dispatch:
        for target, source in zip(*args[:2], strict=True):
            target.copy_(source, non_blocking)
    return None


def set_storage(dispatch, func, args, kwargs):
    """Tensor.set_. Raises RuntimeError for the storage of another GPU or of the host."""
    tensor, source = args[:2]
    here, there = gpu_of(tensor), (gpu_of if isinstance(source, torch.Tensor) else gpu_of_storage)(source)
    if here is not None and here is not there:
        where = "cpu" if there is None else there.device
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{here.device}" to a storage on different device "{where}".  '
            "This is no longer allowed; the devices must match."
        )
    return NotImplemented


def ask_host(dispatch, func, args, kwargs):
    """What C++ asks of tensors wherever they are, and answers without a kernel: forward mode, whether a tangent has its primal's size."""
    return func(*args, **kwargs)


def assert_metadata(dispatch, func, args, kwargs):
    """torch.export leaves it in what it traced: is a tensor still of that type, and there?"""
    options = dict(kwargs)
    wanted, gpu = options.pop("device", None), gpu_of(args[0])
    there = None if wanted is None else dispatch.machine.gpu(wanted)
    if wanted is not None and there is not gpu:
        raise RuntimeError(f"Tensor device mismatch! Expected: {wanted}, got: {gpu.device if gpu else 'cpu'}")
    options.pop("layout", None)
    return func(*args, **options)


_namespaces: dict = {}  # handlers of all operations of a namespace
OPERATIONS = {
    **rnn.CELLS,
    **cuda_only_ops.BATCH_NORM,
    **rnn.RNNS,
    **attention.OPERATIONS,
    aten._assert_tensor_metadata.default: assert_metadata,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten._foreach_copy_.default: foreach_copy,
    aten.set_.source_Storage: set_storage,
    aten.set_.source_Storage_storage_offset: set_storage,
    aten.set_.source_Tensor: set_storage,
    aten.is_same_size.default: ask_host,
    aten._has_same_storage_numel.default: ask_host,
    aten.fill_.Tensor: fill,
    aten.fill.Tensor: fill,
    aten.record_stream.default: record_stream,
    aten.is_pinned.default: answer_is_pinned,
    aten._pin_memory.default: pin_memory,
}
for name in ABSENT:
    packet, _, overload = name.partition(".")
    if hasattr(aten, packet):
        OPERATIONS[getattr(getattr(aten, packet), overload or "default")] = absent


def handler(func):
    """What carries out this operation, where it is not like the others."""
    return OPERATIONS.get(func) or _namespaces.get(func.namespace)


def register_namespace(name: str, how) -> None:
    """From now on `how` carries out all operations of that namespace of torch.ops; it stays when the virtual GPUs go.

    A later one takes its place.
    """
    _namespaces[name] = how


# -- Operations that others wrote in Python, by torch.library: which of their kernels runs here, and whether what it calls comes by.
#
# A kernel for every device (`custom_op`, `default`, CompositeExplicitAutograd) sees tensors on GPUs, and each operation of it comes by;
# so does one for CUDA, where it is the only one. A kernel for the CPU may hand addresses to C or arrays to NumPy: it sees the tensors as
# what they are, the CPU's, and is one kernel of the GPU.


EVERY, CPU, CUDA = "CompositeExplicitAutograd", "CPU", "CUDA"


def run_extension(dispatch, func, args, kwargs):
    """What an operation's kernel in Python makes; NotImplemented where it has none that sees the GPUs."""
    on_gpu = any(gpu_of(tensor) is not None for tensor in tensors_of(args, kwargs))
    by_key = _kernels(func)
    if EVERY in by_key:
        kernel = by_key[EVERY]
    elif CPU in by_key:
        has_own = _compat.has_kernel(func.name(), "Meta") if dispatch.machine.dry else on_gpu
        kernel = None if has_own else by_key[CPU]
    else:
        kernel = by_key.get(CUDA) if on_gpu else None
    if kernel is None:
        return NotImplemented
    with dispatch:  # what it calls comes by
        return kernel(*args, **kwargs)


def extension_on_gpu(func):
    """The operation, for a GPU's tensors: a kernel for the CPU finds the CPU's."""

    def carry_out(*args, **kwargs):
        gpu = next((gpu for tensor in tensors_of(args, kwargs) if (gpu := gpu_of(tensor)) is not None), None)
        if gpu is None:
            return func(*args, **kwargs)
        with gpu.machine.untracked():
            return func(*args, **kwargs)

    return carry_out


def _kernels(func) -> dict:
    """{dispatch key: function} of the kernels that Python registered. Asked anew at every call: a notebook's next cell may add one."""
    custom = _compat.custom_kernels(func)
    if custom is not None:
        keys = {None: EVERY, "cpu": CPU, "cuda": CUDA}
        return {keys[device]: kernel for device, kernel in custom.items() if device in keys}
    name = func.name().partition("::")[2]
    registered = _compat.registered_in_python()
    return {
        key: _compat.kernel(func, key) for key in (EVERY, CPU, CUDA) if f"{func.namespace}/{name}/{key}" in registered
    }


# -- Nested tensors of the strided layout: torch.nested.nested_tensor, and what nn.TransformerEncoder makes of a padding mask in evaluation.
#
# C++ knows no shape of them (`shape` raises), so their operations pass apart from all others: the CPU's kernel for nested tensors works,
# and what it makes lies on the GPU of what it was given. Its time is that of the same operation on tensors of as many rows, as long as
# the mean of theirs. Until a program makes the first one, nothing is asked for them.


FROM_LIST = "_nested_tensor_from_tensor_list"
ITS_ARGUMENTS = ("list", "dtype", "layout", "device", "pin_memory")  # which C++ gives by position
# Sizes are on the host
WITH_SIZES = {"_nested_from_padded", "_nested_view_from_buffer", "_nested_view_from_buffer_copy"}
MAKERS = {FROM_LIST, "_nested_from_padded_and_nested_example", *WITH_SIZES}
ASKS_THE_MASK = "_nested_tensor_from_mask_left_aligned"  # whether one may be made
MAKERS |= {"_nested_tensor_from_mask", ASKS_THE_MASK}
FOR_HOST = {"_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"}


class Nested:
    """Has this process ever made such a tensor? Until then dispatch asks for MAKERS alone."""

    some = False


def run_nested(dispatch, op: Operation, args, kwargs):
    """An operation that makes nested tensors or takes one; NotImplemented for any other. Raises NotImplementedError in a dry run."""
    tensors = tensors_of(args[:1] if op.name in WITH_SIZES else args, kwargs)
    if not (op.name in MAKERS or any(tensor.is_nested for tensor in tensors)):
        return NotImplemented
    if dispatch.machine.dry and op.name == ASKS_THE_MASK:
        warn_at_the_program("nn.TransformerEncoder: in a dry run it works on the padding, too, which a GPU leaves out")
        return False  # its lengths are values, which a dry run does not have
    Nested.some = True
    if dispatch.machine.dry:
        raise NotImplementedError(
            "nested tensors of the strided layout are not modelled in a dry run. Use layout=torch.jagged"
        )
    if op.name == FROM_LIST:
        kwargs = {**dict(zip(ITS_ARGUMENTS[1:], args[1:], strict=False)), **kwargs}
        args = args[:1]
    gpu, kwargs = _place(dispatch, op, args, kwargs, tensors)
    if op.random and gpu is not None:
        out = as_default(dispatch.machine, torch.cuda.default_generators[gpu.index], op.func, args, kwargs)
    else:
        out = op.on_cpu(*args, **kwargs)
    if gpu is None or op.name in FOR_HOST:
        return out
    if op.name in MAKERS and op.waits is not None:
        dispatch.clock.wait_for(dispatch.clock.current(gpu.index))
    outputs = [out] if isinstance(out, Tensor) else tensors_of(out, {}) if isinstance(out, (tuple, list)) else []
    for tensor in outputs:
        place_output(op, tensor, gpu)
    if op.kernel and not op.is_view:
        results = [_flat(tensor) for tensor in outputs]
        flat = [_flat(arg) if isinstance(arg, Tensor) else arg for arg in args]
        moved = [*map(_flat, tensors), *results]
        dispatch.timing.launch(op, flat, kwargs, moved, results[0] if isinstance(out, Tensor) else results, gpu)
    return out


def _place(dispatch, op: Operation, args, kwargs, tensors):
    """Where the result is to be (None: on the CPU), and the arguments by name for the CPU's kernel."""
    device = kwargs.get("device")
    if device is None:
        return dispatch.place(op, args, kwargs, tensors), kwargs
    gpu = dispatch.machine.gpu(device) if device.type == "cuda" else None
    # what C++ copied from a GPU's tensor says CPU
    by_cpp = "layout" in kwargs if op.converts else "pin_memory" not in kwargs
    if gpu is None and by_cpp:
        gpu = dispatch.place(op, args, kwargs, tensors)
    return gpu, {**kwargs, "device": torch.device("cpu")}


def _flat(tensor: Tensor) -> Tensor:
    """As many rows, each as long as the mean of a nested tensor's, without memory; what is not nested as it is."""
    if not tensor.is_nested:
        return tensor
    sizes = aten._nested_tensor_size.default(tensor)
    if sizes.dim() < 2 or not sizes.numel():  # no rows, or numbers for rows
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
    last = sizes[0, 1:].tolist()
    length = -(-tensor.numel() // max(len(sizes) * math.prod(last), 1))
    return torch.empty((len(sizes), length, *last), dtype=tensor.dtype, device="meta")


# -- flex_attention: a higher-order operator, whose kernel on a GPU is compiled for it.
#
# Numbers come from PyTorch's plain implementation, which holds all scores at once; a GPU's kernel never does. So the GPU's memory gets
# the results alone, and its time is that of one kernel, by PyTorch's own count of FLOPs (`torch.utils.flop_counter`) and the share of the
# blocks that its mask leaves. Called without torch.compile, a real GPU would hold the scores, too.


def _backward_flops(query, key, value, *args, out_val=None) -> int:
    return flops.attention_backward(None, query, key, value)  # whose arguments have a gradient in front


FLEX_KERNELS = {
    _compat.flex.flex_attention: Kernel(_compat.flex.flex_attention, flops.attention),
    _compat.flex.flex_attention_backward: Kernel(_compat.flex.flex_attention_backward, _backward_flops),
}


def run_flex(dispatch, func, args, kwargs):
    """Carry out one of FLEX_KERNELS on the GPU of its query; NotImplemented for tensors on the CPU."""
    machine, gpu = dispatch.machine, gpu_of(args[0])
    if gpu is None:
        return NotImplemented
    gpu = machine.own(gpu)
    with machine.untracked():  # closures of a mask may hold GPU tensors, which are the CPU's for as long as this lasts
        results = _compat.implementation(func)(*args, **kwargs)
        if func is _compat.flex.flex_attention and not args[6].get("OUTPUT_MAX"):
            results = (*results[:2], results[2].new_empty(0))  # the kernel leaves out what nobody asked for
        fraction = _share(next(arg for arg in args[3:] if isinstance(arg, tuple)))
    outputs = tensors_of(_leaves(results), {})
    dispatch.timing.book(FLEX_KERNELS[func], args[:3], args[:3], outputs, gpu, fraction)
    return results


def _share(block_mask: tuple) -> float:
    """The share of the blocks that a BlockMask (as_tuple) leaves: some of their scores, or all. 1 where a dry run does not know."""
    some, indices, full = block_mask[2:5]
    left = 0
    for count in [some] if full is None else [some, full]:
        known = values.known_of(count) if _compat.is_really_meta(count) else count
        if known is None:
            return 1.0
        left += int(known.sum())
    return left / max(1, indices.numel())


def _leaves(values) -> list:
    return [part for value in values for part in (_leaves(value) if isinstance(value, tuple) else [value])]
