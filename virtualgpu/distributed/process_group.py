"""The process group of virtual GPUs, and what stands in for torch.distributed's functions that make, name and destroy one, collect its
collectives, and send objects.

Its backend is gloo's, which carries the numbers; it is registered as NCCL's, for "cuda" alone, so that `get_backend()` says nccl and CPU tensors
fail as they do with NCCL. A stand-in is a function that is given the machine, and PyTorch's own: `Patches.stand_in`.
"""

import inspect
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed.shared_clock import announce, processes
from virtualgpu.engine.machine import Machine, dry_runs
from virtualgpu.torch_api.patches import Patches


class Options:
    """ProcessGroupNCCL.Options, where PyTorch was built without NCCL."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class ProcessGroupNCCL(_compat.Gloo):
    """Stands in for NCCL's backend. Its numbers go by gloo."""

    Options: Any = _compat.RealNCCL.Options if _compat.RealNCCL else Options
    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False
    communicators: Any = None  # of the session that it is of
    worlds = 0  # of this process: a later one's addresses lie beside those of the first in torchrun's store

    def __init__(self, store, rank: int, size: int, options=None, timeout: timedelta | None = None):
        limit = timeout or getattr(options, "_timeout", None) or timedelta(minutes=10)
        self.limit, self.settings = limit, options
        if not dist.is_initialized():
            ProcessGroupNCCL.worlds += 1
        store = dist.PrefixStore(f"virtualgpu/world{ProcessGroupNCCL.worlds}", store)
        if size > 1:
            announce(store, rank)
        super().__init__(store, rank, size, timeout=limit)  # all ranks meet
        self.processes = processes(store, size) if size > 1 else []
        if self.communicators is not None:
            self.communicators.keep(self)

    @classmethod
    def create(cls, options, backend_options) -> "ProcessGroupNCCL":
        """What PyTorch's table of backends calls for a new group; before 2.12 PyTorch calls the class."""
        return cls(options.store, options.group_rank, options.group_size, backend_options, options.timeout)

    @property
    def options(self):
        """Those that it was made with; gloo's where there were none."""
        return self.settings if self.settings is not None else super().options

    def name(self) -> str:
        """Always "nccl", though gloo carries the numbers."""
        return "nccl"


def install(machine: Machine, patches: Patches) -> None:
    """PyTorch finds NCCL, and makes its groups from our class; and all of this file's stand-ins, also where a program imported the functions by name."""
    for name in ("destroy_process_group", "split_group", "init_process_group", "new_group", "get_backend"):
        patches.stand_in_everywhere(_compat.c10d, name, globals()[name], machine)
    patches.stand_in(_compat.ProcessGroup, "_start_coalescing", start_coalescing, machine)
    patches.stand_in(_compat.ProcessGroup, "_end_coalescing", end_coalescing, machine)
    for name in OBJECTS:
        patches.stand_in_everywhere(_compat.c10d, name, _of_objects, machine)
    c10d, backend, cpp = _compat.c10d, _compat.c10d.Backend, _compat.cpp
    patches.set(c10d, "_NCCL_AVAILABLE", True)
    patches.replace_everywhere(c10d, "is_nccl_available", lambda: True)
    if c10d.default_pg_nccl_timeout is None:
        patches.set(c10d, "default_pg_nccl_timeout", c10d.default_pg_timeout)
    kind: Any = type("ProcessGroupNCCL", (ProcessGroupNCCL,), {"communicators": machine.communicators})
    plugins = _compat.backends()  # others may register theirs meanwhile
    before = plugins.get("NCCL")
    plugins["NCCL"] = _compat.Plugin(kind.create, True)
    patches.undo(lambda: plugins.pop("NCCL") if before is None else plugins.update(NCCL=before))
    patches.replace(backend, "backend_capability", {**backend.backend_capability, "nccl": ["cuda"]})
    for module in (c10d, torch.distributed, cpp):  # versions that make NCCL's groups themselves call it by this name
        patches.add(module, "ProcessGroupNCCL", kind)
    patches.add(cpp, "_is_nvshmem_available", lambda: False)


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


# -- Python objects that ranks send each other have values in a dry run, too: they travel as small tensors with numbers.
#
# A rank that is played alone has nobody to tell it anything: where each rank has an object, the others' are taken to be like its own,
# and what another rank alone knows raises NotImplementedError.


OF_ONE_RANK = ("broadcast_object_list", "scatter_object_list", "recv_object_list")  # what `src` alone knows
OBJECTS = (*OF_ONE_RANK, "send_object_list", "all_gather_object", "gather_object")


def with_numbers(machine: Machine, original, *args, **kwargs):
    """original(...), for this thread with numbers also in a dry run."""
    if not machine.some_dry:
        return original(*args, **kwargs)
    with dry_runs.set_here(False):
        return original(*args, **kwargs)


def _of_objects(machine: Machine, original, *args, **kwargs):
    if machine.single_rank is None:
        return with_numbers(machine, original, *args, **kwargs)
    name, arguments = original.__name__, inspect.signature(original).bind(*args, **kwargs).arguments
    group = arguments.get("group") or dist.group.WORLD
    if name == "all_gather_object":
        arguments["object_list"][:] = [arguments["obj"]] * group.size()
    elif name == "gather_object" and arguments.get("object_gather_list") is not None:
        arguments["object_gather_list"][:] = [arguments["obj"]] * group.size()
    elif name in OF_ONE_RANK and not _is_this_rank(group, arguments.get("src"), arguments.get("group_src")):
        raise NotImplementedError(
            f"{name}: this process plays rank {dist.get_rank()} alone, and nobody tells it another rank's objects. Play the rank that "
            "knows them (rank=), or start all ranks. A PipelineStage asks for none that is given input_args= and output_args="
        )
    elif name == "scatter_object_list":
        arguments["scatter_object_output_list"][0] = arguments["scatter_object_input_list"][group.rank()]


def _is_this_rank(group, src: int | None, group_src: int | None) -> bool:
    return (src or 0) == dist.get_rank() if group_src is None else group_src == group.rank()
