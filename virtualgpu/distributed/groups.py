"""The life of a process group: what stands in for PyTorch's functions that make, name and destroy one, and collect its collectives.

A stand-in is a function that is given the machine, and PyTorch's own: `Patches.stand_in`.
"""

import sys

import torch

from virtualgpu._compat import distributed as _compat
from virtualgpu.engine.machine import Machine


def init_process_group(machine: Machine, original, *args, **kwargs):
    """While a rank is played alone, groups are of PyTorch's fake backend, whatever is named."""
    rank = machine.single_rank
    if rank is None:
        return original(*args, **kwargs)
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
    c10d = _compat.c10d
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return original(group)
    which = None if group is c10d.GroupMember.WORLD else group
    machine.communicators.leave(which, sys.exc_info()[1])
    try:
        return original(group)
    finally:
        machine.communicators.forget(which)
        if which is None:
            _compat.forget_meshes()


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
    c10d, parent = _compat.c10d, parent_pg or _compat.default_group()
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


def start_coalescing(machine: Machine, original, group, device):
    """Collectives from now on are waited for as one."""
    if not _on_gpus(group, device):
        return original(group, device)
    return machine.communicators.start_coalescing(group)


def end_coalescing(machine: Machine, original, group, device):
    """One work for all of them."""
    if not _on_gpus(group, device):
        return original(group, device)
    return machine.communicators.end_coalescing(group)


def _on_gpus(group, device) -> bool:
    return torch.device(device).type == "cuda" and "cuda" in _compat.device_types(group)
