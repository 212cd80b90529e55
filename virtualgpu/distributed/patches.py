"""torch.distributed with virtual GPUs on: nccl is there, and operations of c10d on GPU tensors are ours.

A stand-in is a function that is given the machine, and PyTorch's own: `Patches.stand_in`.
"""

import atexit
import sys

import torch

from virtualgpu.engine import overrides
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """All that this package replaces; nothing where PyTorch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return
    from virtualgpu._compat import distributed as _compat
    from virtualgpu.distributed import (
        ddp,
        dtensor,
        fsdp1,
        groups,
        objects,
        operations,
        optimizer_states,
        pipelines,
    )

    machine.communicate_by(groups.Communicators(machine))
    overrides.register_namespace("c10d", operations.of_c10d)
    overrides.register_namespace("_c10d_functional", operations.of_functional)
    overrides.register_namespace("_dtensor", operations.of_dtensor)
    _backend(machine, patches)
    c10d, group = _compat.c10d, _compat.ProcessGroup
    for function in (destroy_process_group, split_group, init_process_group, new_group, get_backend):
        patches.stand_in_everywhere(c10d, function.__name__, function, machine)
    for function in (_start_coalescing, _end_coalescing):
        patches.stand_in(group, function.__name__, function, machine)
    if (make := _compat.make_premul_sum) is not None:
        patches.stand_in_everywhere(torch.distributed, make.__name__, _compat.premul_sum)
    atexit.register(machine.communicators.end)  # gloo's threads must not outlive the interpreter
    patches.undo(lambda: atexit.unregister(machine.communicators.end))
    for module in (ddp, dtensor, objects, pipelines, fsdp1, optimizer_states):
        module.install(machine, patches)


def _backend(machine: Machine, patches: Patches) -> None:
    """PyTorch finds NCCL, and makes its groups from our class."""
    from virtualgpu._compat import distributed as _compat
    from virtualgpu.distributed import groups

    c10d, backend, cpp = _compat.c10d, _compat.c10d.Backend, _compat.cpp
    patches.set(c10d, "_NCCL_AVAILABLE", True)
    patches.replace_everywhere(c10d, "is_nccl_available", lambda: True)
    if c10d.default_pg_nccl_timeout is None:
        patches.set(c10d, "default_pg_nccl_timeout", c10d.default_pg_timeout)
    kind = type("ProcessGroupNCCL", (groups.ProcessGroupNCCL,), {"communicators": machine.communicators})
    plugins = _compat.backends()  # others may register theirs meanwhile
    before = plugins.get("NCCL")
    plugins["NCCL"] = _compat.Plugin(kind.create, True)
    patches.undo(lambda: plugins.pop("NCCL") if before is None else plugins.update(NCCL=before))
    patches.replace(backend, "backend_capability", {**backend.backend_capability, "nccl": ["cuda"]})
    for module in (c10d, torch.distributed, cpp):  # versions that make NCCL's groups themselves call it by this name
        patches.add(module, "ProcessGroupNCCL", kind)
    patches.add(cpp, "_is_nvshmem_available", lambda: False)


# -- the life of a group


def init_process_group(machine: Machine, original, *args, **kwargs):
    """While a rank is played alone, groups are of PyTorch's fake backend, whatever is named."""
    rank = machine.single_rank
    if rank is None:
        return original(*args, **kwargs)
    from virtualgpu._compat import distributed as _compat

    _compat.know_fake_backend()

    device = {"device_id": kwargs["device_id"]} if kwargs.get("device_id") is not None else {}
    store = torch.distributed.HashStore()
    return original("fake", rank=rank.rank, world_size=rank.world_size, store=store, **device)


def new_group(machine: Machine, original, ranks=None, timeout=None, backend=None, *args, **kwargs):
    """The same of a part of the ranks."""
    return original(ranks, timeout, backend if machine.single_rank is None else "fake", *args, **kwargs)


def get_backend(machine: Machine, original, group=None) -> str:
    """The fake backend says nccl."""
    name = original(group)
    return "nccl" if machine.single_rank is not None and name == "fake" else name


def destroy_process_group(machine: Machine, original, group=None):
    """Its communicators go, too, and with the last group what DTensor remembers of meshes: one process plays ranks of many layouts in turn."""
    from virtualgpu._compat.distributed import c10d, forget_meshes

    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return original(group)
    which = None if group is c10d.GroupMember.WORLD else group
    machine.communicators.leave(which, sys.exc_info()[1])
    try:
        return original(group)
    finally:
        machine.communicators.forget(which)
        if which is None:
            forget_meshes()


def split_group(
    machine: Machine,
    original,
    parent_pg=None,
    split_ranks=None,
    timeout=None,
    pg_options=None,
    group_desc=None,
    **others,
):
    """Each rank in the group that it is in; a rank in none of them in none."""
    from virtualgpu._compat.distributed import c10d, default_group

    parent = parent_pg or default_group()
    if c10d.get_backend(parent) != "nccl":
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **others)
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    members = c10d.get_process_group_ranks(parent)
    mine = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
    if mine is None:
        return c10d.GroupMember.NON_GROUP_MEMBER
    return c10d.new_group(
        [members[rank] for rank in mine],
        timeout=timeout,
        backend="nccl",
        pg_options=pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
    )


# -- a coalescing manager: collectives in between are waited for as one


def _start_coalescing(machine: Machine, original, group, device):
    if not _on_gpus(group, device):
        return original(group, device)
    return machine.communicators.start_coalescing(group)


def _end_coalescing(machine: Machine, original, group, device):
    if not _on_gpus(group, device):
        return original(group, device)
    return machine.communicators.end_coalescing(group)


def _on_gpus(group, device) -> bool:
    from virtualgpu._compat.distributed import device_types

    return torch.device(device).type == "cuda" and "cuda" in device_types(group)
