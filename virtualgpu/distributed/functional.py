"""Functional collectives (`_c10d_functional`), which DTensor and clip_grad_norm_ use: new tensors, made on the GPU, and a wait later.

PyTorch's C++ would make the results on what it takes for their device, the CPU. Here they are made by ordinary operations, so that
each has its place, its bytes and its time.
"""

import torch

from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import packet, schema
from virtualgpu.distributed.calls import OPERATIONS
from virtualgpu.engine.allocation import gpu_of, storage_of

WORK = "_virtual_work"  # on the storage of a result: the collective that fills it


def run(dispatch, func, args, kwargs, communicators):
    """Carry out one of them. Raises NotImplementedError for one that is not known."""
    name = packet(func).__name__
    if name in ("wait_tensor", "wait_tensors"):
        tensors = [args[0]] if name == "wait_tensor" else args[0]
        for tensor in tensors:
            wait(tensor)
        with dispatch.machine.untracked():
            func(*args, **kwargs)  # for those that PyTorch's C++ made
        return args[0]
    if name == "_wrap_tensor_autograd":
        return _compat.async_tensor()(
            args[0]
        )  # what the operation does; its kernel for shapes alone makes a new tensor
    values = {argument.name: value for argument, value in zip(schema(func).arguments, args, strict=False)} | kwargs
    group = values.get("group_name")
    if name not in FUNCTIONS or group is None:
        return func(*args, **kwargs)
    group = _compat.named(group) if isinstance(group, str) else _compat.group_of(group)
    given = values["inputs"] if "inputs" in values else [values["input"]]
    if not communicators.handles(group, given):
        return func(*args, **kwargs)
    if communicators.foreign(group):
        with dispatch.machine.untracked():
            out = func(*args, **kwargs)
        for made in out if isinstance(out, list) else [out]:
            if gpu_of(made) is None:
                dispatch.machine.place(made, gpu_of(given[0]))
        return out
    issue, base = FUNCTIONS[name]
    operation, _ = OPERATIONS[base]
    with dispatch:
        made = [issue(tensor, values, group.size()) for tensor in given]
    for out, arguments in made:
        if "reduce_op" in values:
            op = values["reduce_op"]  # a name, or (from 2.15 on) an operation
            arguments["reduce_op"] = getattr(_compat.ReduceOp, op.upper()) if isinstance(op, str) else op
        work = communicators.start(group, operation(arguments, group.size()), True)
        setattr(storage_of(out), WORK, work)
    results = [out for out, _ in made]
    return results if "inputs" in values else results[0]


def wait(tensor: torch.Tensor) -> None:
    """The current stream waits for the collective that fills this tensor."""
    storage = storage_of(tensor)
    work = getattr(storage, WORK, None)
    if work is not None:
        delattr(storage, WORK)
        work.wait()


def _all_reduce(tensor, values, size):
    out = tensor.clone(memory_format=torch.contiguous_format)
    return out, {"tensors": [out]}


def _all_reduce_in_place(tensor, values, size):
    return tensor, {"tensors": [tensor]}


def _all_gather(tensor, values, size):
    out = values.get("out")
    if out is None:
        out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    return out, {"output_tensor": out, "input_tensor": tensor.contiguous()}


def _reduce_scatter(tensor, values, size):
    out = values.get("out")
    if out is None:
        out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    return out, {"output_tensor": out, "input_tensor": tensor.contiguous()}


def _all_to_all(tensor, values, size):
    splits = values["output_split_sizes"], values["input_split_sizes"]
    out = tensor.new_empty((sum(splits[0]), *tensor.shape[1:]))
    return out, {
        "output": out,
        "input": tensor.contiguous(),
        "output_split_sizes": splits[0],
        "input_split_sizes": splits[1],
    }


def _broadcast(tensor, values, size):
    out = tensor.clone(memory_format=torch.contiguous_format)
    return out, {"tensors": [out], "root_rank": values["src"]}


def _broadcast_in_place(tensor, values, size):
    return tensor, {"tensors": [tensor], "root_rank": values["src"]}


FUNCTIONS = {
    "all_reduce": (_all_reduce, "allreduce_"),
    "all_reduce_": (_all_reduce_in_place, "allreduce_"),
    "all_reduce_coalesced": (_all_reduce, "allreduce_"),
    "all_reduce_coalesced_": (_all_reduce_in_place, "allreduce_"),
    "all_gather_into_tensor": (_all_gather, "_allgather_base_"),
    "all_gather_into_tensor_out": (_all_gather, "_allgather_base_"),
    "all_gather_into_tensor_coalesced": (_all_gather, "_allgather_base_"),
    "reduce_scatter_tensor": (_reduce_scatter, "_reduce_scatter_base_"),
    "reduce_scatter_tensor_out": (_reduce_scatter, "_reduce_scatter_base_"),
    "reduce_scatter_tensor_coalesced": (_reduce_scatter, "_reduce_scatter_base_"),
    "all_to_all_single": (_all_to_all, "alltoall_base_"),
    "broadcast": (_broadcast, "broadcast_"),
    "broadcast_": (_broadcast_in_place, "broadcast_"),
}
