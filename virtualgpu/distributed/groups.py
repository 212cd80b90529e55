"""Process groups of virtual GPUs: what `init_process_group("nccl")` makes, and the communicators behind all groups.

The backend is gloo's, which carries the numbers; it is registered as NCCL's, for "cuda" alone, so that `get_backend()` says nccl and
CPU tensors fail as they do with NCCL. As with NCCL a communicator is made at the first collective of tensors of a GPU: a rank that uses
two GPUs in one group has two.
"""

import json
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu._compat import is_really_meta
from virtualgpu.distributed import _compat, transport
from virtualgpu.distributed.arrivals import Arrivals, SingleRankArrivals
from virtualgpu.distributed.calls import OPERATIONS, Call
from virtualgpu.distributed.communicator import Communicator
from virtualgpu.distributed.counts import SymmetricBackend
from virtualgpu.distributed.errors import Naming
from virtualgpu.distributed.meeting import Meeting, Processes
from virtualgpu.distributed.message_log import RECV, SEND
from virtualgpu.distributed.nodes import Layout, Where, one_gpu_each
from virtualgpu.distributed.statistics import Statistics
from virtualgpu.distributed.work import CoalescedWork, VirtualWork
from virtualgpu.engine.allocation import allocation_of, gpu_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.values import invalidate


class Options:
    """ProcessGroupNCCL.Options, where PyTorch was built without NCCL."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class ProcessGroupNCCL(_compat.Gloo):
    """Stands in for NCCL's backend. Its numbers go by gloo."""

    Options = _compat.RealNCCL.Options if _compat.RealNCCL else Options
    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False

    def __init__(self, store, rank: int, size: int, options=None, timeout: timedelta | None = None):
        limit = timeout or getattr(options, "_timeout", None) or timedelta(minutes=10)
        self.limit, self.settings = limit, options
        self.processes = Processes(store, rank, size) if size > 1 else None
        super().__init__(store, rank, size, timeout=limit)  # all ranks meet
        if self.processes is not None:
            self.processes.read()

    @property
    def options(self):
        """Those that it was made with; gloo's where there were none."""
        return self.settings if self.settings is not None else super().options

    def name(self) -> str:
        """Always "nccl", though gloo carries the numbers."""
        return "nccl"


class Communicators:
    """Of this process, by the names of their groups and the GPU (its index) that the tensors are on."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.known: dict[tuple[str, int], Communicator] = {}
        self.coalescing: dict[
            str, Communicator | None
        ] = {}  # groups inside of a coalescing manager, and which collects
        self.backends: dict[int, ProcessGroupNCCL] = {}  # kept, so that PyTorch finds them again
        self.statistics = Statistics(machine.clock)
        self.launched = None  # the store in which ranks of `launch` say that they have returned

    def keep(self, backend: ProcessGroupNCCL) -> None:
        """Until all groups are destroyed: PyTorch finds the Python object again only while somebody holds it."""
        self.backends[id(backend)] = backend

    def drain(self) -> None:
        """All collectives and messages that this rank has come to are over, their ends known. Waits for other ranks."""
        for communicator in list(self.known.values()):
            communicator.drain()

    def forget(self, group=None) -> None:
        """A group is destroyed; None: all are."""
        for name, index in list(self.known):
            if group is None or name == group.group_name:
                communicator = self.known.pop((name, index), None)
                if communicator is not None:
                    communicator.arrivals.leave()
        if group is None:
            self.backends.clear()
            transport.let_go()

    # -- collectives

    def handles(self, group, tensors) -> bool:
        """Do these tensors live on virtual GPUs, or the group there alone? Raises NCCL's error for CPU tensors in its group."""
        return self._gpu(group, tensors) is not None

    def run(self, func, args, kwargs):
        """An operation of c10d."""
        name = func._overloadpacket.__name__
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = _compat.group_of(values["process_group"])
        if name not in OPERATIONS:
            return self._other(name, group, func, args, kwargs)
        read, returns_outputs = OPERATIONS[name]
        _check_for_tensors(func, values)
        if self.foreign(group):
            with self.machine.untracked():
                return func(*args, **kwargs)
        call = read(values, group.size())
        gpu = self._gpu_of_barrier(group, values) if name == "barrier" else self._gpu(group, call.tensors)
        if gpu is None:
            invalidate(filter(is_really_meta, call.tensors))
            if name == "barrier" and self.machine.dry:  # a shape as its first argument would keep nobody waiting
                with self.machine.untracked():
                    return func(torch.empty(1), *args[1:], **kwargs)
            return func(*args, **kwargs)
        work = self.start(group, call, values.get("async_op", True), gpu).boxed()
        return (args[0], work) if returns_outputs else work

    def start(self, group, call: Call, asynchronous: bool, gpu: GPU | None = None) -> VirtualWork:
        """This rank has come to a collective. gpu: by default that of the tensors. Those without a place get it."""
        gpu = gpu or self._gpu(group, call.tensors)
        for tensor in call.tensors:
            if gpu_of(tensor) is None:  # made by C++: a bucket of DDP
                self.machine.place(tensor, gpu)
        return self.of(group, gpu, call.kind).start(call, gpu, asynchronous)

    def of(self, group, gpu: GPU, what: str) -> Communicator:
        """The group's communicator for that GPU; the first time, all its ranks meet, each with a GPU that is new to the group. what:
        names, in an error, what this rank has come to."""
        name = group.group_name
        communicator = self.known.get((name, gpu.index))
        if communicator is None:
            communicator = self.known[name, gpu.index] = self._meet(group, gpu, what)
        if name in self.coalescing and self.coalescing[name] is None:
            self.coalescing[name], communicator.together = communicator, []
        return communicator

    def start_coalescing(self, group) -> None:
        """Collectives of this group are collected from now on, by the communicator of the first one's tensors."""
        self.coalescing[group.group_name] = None

    def end_coalescing(self, group) -> CoalescedWork:
        """One work for all that was called since."""
        communicator = self.coalescing.pop(group.group_name, None)
        return CoalescedWork([]) if communicator is None else communicator.end_together()

    def _of_group(self, group) -> list[Communicator]:
        """Those of the GPUs that the group has used, in the order in which they were made: on all ranks the same."""
        return [communicator for (name, _), communicator in self.known.items() if name == group.group_name]

    def _meet(self, group, gpu: GPU, what: str) -> Communicator:
        rank, size = group.rank(), group.size()
        ranks = dist.get_process_group_ranks(group)
        here, backend = Where.of(self.machine, gpu), self._backend(group)
        timeout = getattr(backend, "limit", None) or timedelta(minutes=10)
        if _compat.is_fake(group):
            alone = self.machine.single_rank
            found = [here if alone is None else here._replace(node=alone.node(member)) for member in ranks]
            arrivals, backend = (
                SingleRankArrivals(rank, size),
                SymmetricBackend(rank, size) if self.machine.dry else None,
            )
        else:
            with Naming(f"{what} of rank {ranks[rank]} in group {group.group_name!r}", ranks, timeout):
                arrivals, found = self._meet_others(group, here, ranks, timeout)
            if isinstance(backend, ProcessGroupNCCL):  # gloo's ranks may share a GPU
                one_gpu_each(found)
        communicator = Communicator(self.machine, group.group_name, ranks, rank, backend, arrivals, Layout(found), gpu)
        communicator.timeout = timeout
        return communicator

    def _meet_others(self, group, here: Where, ranks: list[int], timeout: timedelta) -> tuple[Arrivals, list[Where]]:
        """All ranks of the group come here. Raises RankEnded or RankLate for one that does not."""
        rank, size = group.rank(), group.size()
        store = dist.PrefixStore(f"virtualgpu/{len(self._of_group(group))}", _compat.store_of(group))
        processes = getattr(self._backend(group), "processes", None)
        meeting = Meeting(store, size, timeout, processes, lambda member: self._returned(ranks[member]))
        arrivals = Arrivals.meet(meeting, rank, size)
        try:
            meeting.set(f"virtualgpu/{rank}", json.dumps(here.said()))
            keys = {f"virtualgpu/{other}": other for other in range(size)}
            meeting.wait(keys)
            return arrivals, [Where.heard(json.loads(meeting.get(key, other))) for key, other in keys.items()]
        finally:
            arrivals.unname()

    def returned(self, store, rank: int) -> None:
        """This rank of `launch` has returned from its function: who waits for it need not. In the first communicator of all ranks it
        comes to one barrier more."""
        last = self._of_group(dist.group.WORLD)[:1] if dist.is_initialized() else []
        for communicator in self.known.values():
            if communicator not in last:
                communicator.arrivals.leave()
        store.set(_returned(rank), "")

    def _returned(self, rank: int) -> bool:
        return self.launched is not None and self.launched.check([_returned(rank)])

    def _backend(self, group):
        for device in ("cuda", "cpu"):
            try:
                return group._get_backend(torch.device(device))
            except RuntimeError:
                continue
        return None

    def foreign(self, group) -> bool:
        """Is it of a backend that somebody wrote (PyTorch's tests have one of threads)? That one carries the numbers as it does for
        CPU tensors; how long it takes is not known.
        """
        if type(group) is not _compat.ProcessGroup:
            return True  # written in Python as a whole
        backend = self._backend(group)
        return not isinstance(backend, ProcessGroupNCCL) and type(backend).__module__ not in _compat.OF_PYTORCH

    def _gpu_of_barrier(self, group, values: dict) -> GPU | None:
        """As ProcessGroupNCCL::barrier chooses: what the caller names, what init_process_group was told, what the group has used; or
        else by the rank's number, which is right where ranks and GPUs are in one order."""
        used = [communicator.gpu for communicator in self._of_group(group) if communicator.failed is None]
        if not self._only_gpus(group):  # gloo's: but hosts whose GPUs are used together meet on their clocks, too
            return used[0] if used else None
        device = getattr(group, "bound_device_id", None)
        if values["device_ids"]:
            return self.machine.gpu(values["device_ids"][0])
        if device is not None:
            return self.machine.gpu(device)
        if used:
            return used[0]
        return self.machine.gpu(dist.get_rank() % len(self.machine.look()))

    def _gpu(self, group, tensors) -> GPU | None:
        """The GPU of these tensors; None for the CPU's, where the group has a backend for them."""
        found = {gpu for tensor in tensors if (gpu := gpu_of(tensor)) is not None}
        if len(found) > 1:
            raise ValueError(f"Expected all tensors of a collective on one device, but found {sorted(map(str, found))}")
        if found:
            return self.machine.own(found.pop())
        on_gpu = self._only_gpus(group)
        free = [
            tensor for tensor in tensors if (allocation := allocation_of(tensor)) is not None and allocation.gpu is None
        ]
        if tensors and len(free) == len(tensors) and self._has_gpus(group):
            return self.machine.gpu("cuda")
        if on_gpu and tensors:
            raise RuntimeError("No backend type associated with device type cpu")
        return None

    def _only_gpus(self, group) -> bool:
        return {device.type for device in group._device_types} == {"cuda"}

    def _has_gpus(self, group) -> bool:
        return "cuda" in {device.type for device in group._device_types}

    def _other(self, name: str, group, func, args, kwargs):
        ways = {"send": SEND, "recv_": RECV, "recv_any_source_": RECV}
        if self.foreign(group):
            with self.machine.untracked():
                return func(*args, **kwargs)
        gpu = self._gpu(group, args[0]) if name in ways else None
        if gpu is None:
            return func(*args, **kwargs)
        if name == "recv_any_source_":
            raise RuntimeError("recv from any source is not there with NCCL: name the rank, src=")
        way = ("send to", "recv from")[ways[name]]
        communicator = self.of(group, gpu, f"{way} rank {dist.get_global_rank(group, args[2])}")
        return communicator.message(ways[name], args[2], args[0][0], gpu).boxed()


def _returned(rank: int) -> str:
    return f"virtualgpu/returned/{rank}"


def _check_for_tensors(func, values: dict) -> None:
    """The dispatcher's own error where nothing says on which device the collective is. It does not look into lists of lists."""
    given = [value for value in values.values() if isinstance(value, (list, tuple))]
    alone = any(isinstance(value, torch.Tensor) for value in values.values())
    if not alone and not any(isinstance(item, torch.Tensor) for items in given for item in items):
        raise NotImplementedError(
            "There were no tensor arguments to this function (e.g., you passed an empty list of Tensors), but no fallback "
            f"function is registered for schema {func._schema.name}."
        )
