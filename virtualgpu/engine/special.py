"""Operations that are not like the others: what each does on virtual GPUs.

Each handler takes (dispatch, func, args, kwargs) and returns the operation's result.
"""

import opcode

import torch

from virtualgpu.engine.home import HOME, callers_frame, gpu_of, storage_of

aten = torch.ops.aten


def record_stream(dispatch, func, args, kwargs):
    """The memory of this tensor is not free before that stream is done with it."""
    tensor, stream = args[:2]
    home = getattr(storage_of(tensor), HOME, None)
    if home is not None and home.gpu is not None and home.block is not None:
        dispatch.machine.own(home.gpu)
        with home.gpu.lock:
            home.gpu.memory.record_stream(home.block, stream.stream_id)


def is_pinned(dispatch, func, args, kwargs):
    return getattr(storage_of(args[0]), "_virtual_pinned", False)


def pin_memory(dispatch, func, args, kwargs):
    tensor = args[0]
    if gpu_of(tensor) is not None or tensor.layout is not torch.strided:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    with dispatch.machine.untracked():
        copy = aten.clone.default(tensor)
    storage_of(copy)._virtual_pinned = True
    return copy


def move_to_nested(dispatch, func, args, kwargs):
    """torch.nested.nested_tensor(..., device="cuda") of the strided layout."""
    raise NotImplementedError(
        'nested tensors of the strided layout are not modelled on virtual GPUs; use layout=torch.jagged, or device="cpu"'
    )


OPERATIONS = {
    aten.record_stream.default: record_stream,
    aten.is_pinned.default: is_pinned,
    aten._pin_memory.default: pin_memory,
    aten._nested_tensor_from_tensor_list.default: move_to_nested,
}

STORE = {opcode.opmap[name] for name in ("STORE_SUBSCR",)}


def may_stay_on_cpu(op, tensor: torch.Tensor, gpu, here) -> bool:
    """x[[0, 1]] = 0 becomes index_fill_ with an index on the CPU, which is allowed in a subscript, and nowhere else."""
    if op.name != "index_fill_" or here is not None or gpu is None:
        return False
    frame = callers_frame()
    return frame is not None and frame.f_code.co_code[frame.f_lasti] in STORE
