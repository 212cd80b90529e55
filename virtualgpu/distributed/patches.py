"""torch.distributed with virtual GPUs on: nccl is there, and operations of c10d on GPU tensors are ours."""

import atexit
import functools

import torch

from virtualgpu.engine import overrides
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """All that this package replaces; nothing where PyTorch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return
    from virtualgpu.distributed import _compat, ddp, dtensor, fsdp1, groups, objects, pipelines, rpc, single_rank

    communicators = groups.Communicators(machine)
    machine.communicate_by(communicators)
    _operations()
    _backend(communicators, patches)
    _lifetime(communicators, patches)
    _coalescing(communicators, patches)
    if hasattr(torch.distributed, "_make_nccl_premul_sum"):
        make = torch.distributed._make_nccl_premul_sum
        patches.replace_everywhere(torch.distributed, "_make_nccl_premul_sum", _compat.premul_sum(make))
    single_rank.install(machine, patches)
    ddp.install(machine, patches)
    dtensor.install(machine, patches)
    fsdp1.install(machine, patches)
    objects.install(machine, patches)
    pipelines.install(machine, patches)
    rpc.install(machine, patches)


def _operations() -> None:
    """What the dispatch mode does with them."""
    from virtualgpu.distributed import functional

    def of_c10d(dispatch, func, args, kwargs):
        return dispatch.machine.communicators.run(func, args, kwargs)

    def of_functional(dispatch, func, args, kwargs):
        return functional.run(dispatch, func, args, kwargs, dispatch.machine.communicators)

    for namespace, handler in (("c10d", of_c10d), ("_c10d_functional", of_functional)):
        overrides.NAMESPACES[namespace] = handler


def _backend(communicators, patches: Patches) -> None:
    from virtualgpu.distributed import groups
    from virtualgpu.distributed._compat import c10d

    backend, dist = c10d.Backend, torch.distributed
    patches.set(c10d, "_NCCL_AVAILABLE", True)
    patches.replace_everywhere(c10d, "is_nccl_available", lambda: True)
    if c10d.default_pg_nccl_timeout is None:
        patches.set(c10d, "default_pg_nccl_timeout", c10d.default_pg_timeout)

    class ProcessGroupNCCL(groups.ProcessGroupNCCL):
        """Versions that make NCCL's groups themselves call it by this name."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            communicators.keep(self)

    def create(options, backend_options) -> ProcessGroupNCCL:
        """What PyTorch's table of backends calls for a new group."""
        return ProcessGroupNCCL(options.store, options.group_rank, options.group_size, backend_options, options.timeout)

    plugins = backend._plugins  # others may register theirs meanwhile
    before = plugins.get("NCCL")
    plugins["NCCL"] = backend._BackendPlugin(create, True)
    patches.undo(lambda: plugins.pop("NCCL") if before is None else plugins.update(NCCL=before))
    patches.replace(backend, "backend_capability", {**backend.backend_capability, "nccl": ["cuda"]})
    cpp = torch._C._distributed_c10d
    for module in (c10d, dist, cpp):
        patches.add(module, "ProcessGroupNCCL", ProcessGroupNCCL)
    patches.add(cpp, "_is_nvshmem_available", lambda: False)


def _lifetime(communicators, patches: Patches) -> None:
    from virtualgpu.distributed._compat import c10d

    destroy, split = c10d.destroy_process_group, c10d.split_group

    @functools.wraps(destroy)
    def destroy_process_group(group=None):
        world = group is None or group is c10d.GroupMember.WORLD
        try:
            return destroy(group)
        finally:
            if world:
                communicators.forget()
            elif group is not c10d.GroupMember.NON_GROUP_MEMBER:
                communicators.forget(group)

    @functools.wraps(split)
    def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, **others):
        """Each rank in the group that it is in; a rank in none of them in none."""
        parent = parent_pg or c10d._get_default_group()
        if c10d.get_backend(parent) != "nccl":
            return split(parent_pg, split_ranks, timeout, pg_options, group_desc, **others)
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

    patches.replace_everywhere(c10d, "destroy_process_group", destroy_process_group)
    patches.replace_everywhere(c10d, "split_group", split_group)
    atexit.register(communicators.forget)  # gloo's threads must not outlive the interpreter
    patches.undo(lambda: atexit.unregister(communicators.forget))


def _coalescing(communicators, patches: Patches) -> None:
    """Collectives between _start_coalescing and _end_coalescing are waited for as one."""
    from virtualgpu.distributed._compat import ProcessGroup

    start, end = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

    def ours(group, device):
        return torch.device(device).type == "cuda" and "cuda" in {d.type for d in group._device_types}

    def start_coalescing(group, device):
        if not ours(group, device):
            return start(group, device)
        communicators.start_coalescing(group)

    def end_coalescing(group, device):
        if not ours(group, device):
            return end(group, device)
        return communicators.end_coalescing(group)

    patches.replace(ProcessGroup, "_start_coalescing", start_coalescing)
    patches.replace(ProcessGroup, "_end_coalescing", end_coalescing)
