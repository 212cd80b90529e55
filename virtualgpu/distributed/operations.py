"""What the dispatch mode does with operations of c10d, and with functional collectives."""

import functools
from collections.abc import Mapping

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import is_really_meta, packet, schema
from virtualgpu.distributed.collectives import FUNCTIONS, OPERATIONS
from virtualgpu.distributed.message_log import RECV, SEND
from virtualgpu.engine.allocation import gpu_of, storage_of
from virtualgpu.engine.values import invalidate

WORK = "_virtual_work"  # on the storage of a functional collective's result: the collective that fills it
MESSAGES = {"send": (SEND, "send to"), "recv_": (RECV, "recv from"), "recv_any_source_": (RECV, "recv from")}


@functools.cache
def _signature(func) -> tuple[tuple[str, ...], bool]:
    """The names of an operation's arguments, and whether it returns tensors beside the work."""
    return tuple(argument.name for argument in schema(func).arguments), len(schema(func).returns) > 1


def of_c10d(dispatch, func, args, kwargs):
    """An operation of c10d."""
    machine, communicators = dispatch.machine, dispatch.machine.communicators
    name = packet(func).__name__
    names, returns_tensors = _signature(func)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _compat.group_of(values["process_group"])
    if name not in OPERATIONS:
        return _of_a_message(dispatch, name, group, func, args, kwargs)
    _check_for_tensors(func, values)
    if communicators.foreign(group):
        with machine.untracked():
            return func(*args, **kwargs)
    collective, read = OPERATIONS[name]
    call = read(collective, values, group.size())
    if name == "barrier":
        gpu = communicators.gpu_of_barrier(group, values["device_ids"])
    else:
        gpu = communicators.place(group, call.tensors)
    if gpu is None:
        invalidate(filter(is_really_meta, call.tensors))
        if name == "barrier" and machine.dry:  # a shape as its first argument would keep nobody waiting
            with machine.untracked():
                return func(torch.empty(1), *args[1:], **kwargs)
        return func(*args, **kwargs)
    work = communicators.of(group, gpu, call.kind).start(call, gpu, values.get("async_op", True)).boxed()
    return (args[0], work) if returns_tensors else work


def _check_for_tensors(func, values: Mapping) -> None:
    """The dispatcher's own error where nothing says on which device the collective is. It does not look into lists of lists."""
    for value in values.values():
        if isinstance(value, torch.Tensor):
            return
        if isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    return
    raise NotImplementedError(
        "There were no tensor arguments to this function (e.g., you passed an empty list of Tensors), but no fallback "
        f"function is registered for schema {schema(func).name}."
    )


def _of_a_message(dispatch, name: str, group, func, args, kwargs):
    communicators = dispatch.machine.communicators
    if communicators.foreign(group):
        with dispatch.machine.untracked():
            return func(*args, **kwargs)
    gpu = communicators.place(group, args[0]) if name in MESSAGES else None
    if gpu is None:
        return func(*args, **kwargs)
    if name == "recv_any_source_":
        raise RuntimeError("recv from any source is not there with NCCL: name the rank, src=")
    direction, verb = MESSAGES[name]
    communicator = communicators.of(group, gpu, f"{verb} rank {dist.get_global_rank(group, args[2])}")
    return communicator.message(direction, args[2], args[0][0], gpu).boxed()


def of_functional(dispatch, func, args, kwargs):
    """A functional collective; one that is not known is PyTorch's to carry out."""
    machine, communicators = dispatch.machine, dispatch.machine.communicators
    name = packet(func).__name__
    if name in ("wait_tensor", "wait_tensors"):
        for tensor in [args[0]] if name == "wait_tensor" else args[0]:
            wait(tensor)
        with machine.untracked():
            func(*args, **kwargs)  # for those that PyTorch's C++ made
        return args[0]
    if name == "_wrap_tensor_autograd":
        return _compat.async_tensor()(
            args[0]
        )  # what the operation does; its kernel for shapes alone makes a new tensor
    values = {**dict(zip(_signature(func)[0], args, strict=False)), **kwargs}
    group = values.get("group_name")
    if name not in FUNCTIONS or group is None:
        return func(*args, **kwargs)
    group = _compat.named(group) if isinstance(group, str) else _compat.group_of(group)
    inputs = values["inputs"] if "inputs" in values else [values["input"]]
    if communicators.place(group, inputs) is None:
        return func(*args, **kwargs)
    if communicators.foreign(group):
        with machine.untracked():
            out = func(*args, **kwargs)
        for result in out if isinstance(out, list) else [out]:
            if gpu_of(result) is None:
                machine.place(result, gpu_of(inputs[0]))
        return out
    collective, make = FUNCTIONS[name]
    with dispatch:
        made = [make(collective, tensor, values, group.size()) for tensor in inputs]
    for out, call in made:
        gpu = communicators.place(group, call.tensors)
        work = communicators.of(group, gpu, call.kind).start(call, gpu, True)
        setattr(storage_of(out), WORK, work)
    results = [out for out, _ in made]
    return results if "inputs" in values else results[0]


def of_dtensor(dispatch, func, args, kwargs):
    """A DTensor's shards of one dimension become those of another: an all_to_all and its wait, as PyTorch's C++ makes it."""
    communicators = dispatch.machine.communicators
    values = {**dict(zip(_signature(func)[0], args, strict=False)), **kwargs}
    if packet(func).__name__ != "shard_dim_alltoall":
        return func(*args, **kwargs)
    tensor, name = values["input"], values["group_name"]
    group = _compat.named(name) if isinstance(name, str) else _compat.group_of(name)
    if communicators.place(group, [tensor]) is None:
        return func(*args, **kwargs)
    if communicators.foreign(group):
        with dispatch.machine.untracked():
            return dispatch.machine.place(func(*args, **kwargs), gpu_of(tensor))
    functional, ones = torch.ops._c10d_functional, [1] * group.size()
    with dispatch:
        parts = torch.stack(tensor.chunk(group.size(), values["shard_dim"]))
        parts = functional.wait_tensor(functional.all_to_all_single(parts, ones, ones, name))
        return torch.cat(parts.unbind(), values["gather_dim"])


def wait(tensor: torch.Tensor) -> None:
    """The current stream waits for the collective that fills this tensor."""
    storage = storage_of(tensor)
    work = getattr(storage, WORK, None)
    if work is not None:
        delattr(storage, WORK)
        work.wait()
