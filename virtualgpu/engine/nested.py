"""Nested tensors of the strided layout: torch.nested.nested_tensor, and what nn.TransformerEncoder makes of a padding mask in evaluation.

C++ knows no shape of them (`shape` raises), so their operations pass apart from all others: the CPU's kernel for nested tensors works,
and what it makes lies on the GPU of what it was given. Its time is that of the same operation on tensors of as many rows, as long as
the mean of theirs. Until a program makes the first one, nothing is asked for them.
"""

import math

import torch
from torch import Tensor

from virtualgpu.engine.frames import warn_at_the_program
from virtualgpu.engine.operations import Operation
from virtualgpu.engine.rng import as_default
from virtualgpu.engine.storage import place_output, tensors_of

aten, CPU = torch.ops.aten, torch.device("cpu")
FROM_LIST = "_nested_tensor_from_tensor_list"
ITS_ARGUMENTS = ("list", "dtype", "layout", "device", "pin_memory")  # which C++ gives by position
# Sizes are on the host
WITH_SIZES = {"_nested_from_padded", "_nested_view_from_buffer", "_nested_view_from_buffer_copy"}
MAKERS = {FROM_LIST, "_nested_from_padded_and_nested_example", *WITH_SIZES}
ASKS_THE_MASK = "_nested_tensor_from_mask_left_aligned"  # whether one may be made
MAKERS |= {"_nested_tensor_from_mask", ASKS_THE_MASK}
FOR_HOST = {"_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"}
some = False  # has this process ever made one? Until then dispatch asks for MAKERS alone


def run(dispatch, op: Operation, args, kwargs):
    """An operation that makes nested tensors or takes one; NotImplemented for any other. Raises NotImplementedError in a dry run."""
    global some
    tensors = tensors_of(args[:1] if op.name in WITH_SIZES else args, kwargs)
    if not (op.name in MAKERS or any(tensor.is_nested for tensor in tensors)):
        return NotImplemented
    if dispatch.machine.dry and op.name == ASKS_THE_MASK:
        warn_at_the_program("nn.TransformerEncoder: in a dry run it works on the padding, too, which a GPU leaves out")
        return False  # its lengths are values, which a dry run does not have
    some = True
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
    return gpu, {**kwargs, "device": CPU}


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
