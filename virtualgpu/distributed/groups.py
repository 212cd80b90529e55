"""Process groups of virtual GPUs: what `init_process_group("nccl")` makes, and the communicators behind all groups.

The backend is gloo's, which carries the numbers; it is registered as NCCL's, for "cuda" alone, so that `get_backend()` says nccl and
CPU tensors fail as they do with NCCL. As with NCCL a communicator is made at the first collective of tensors of a GPU: a rank that uses
two GPUs in one group has two.
"""

import json
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import transport
from virtualgpu.distributed.arrivals import LEFT, RAISED, Arrivals, SingleRankArrivals
from virtualgpu.distributed.communicator import Communicator
from virtualgpu.distributed.meeting import Meeting, announce, explain, processes
from virtualgpu.distributed.nodes import Layout, Where, one_gpu_each
from virtualgpu.distributed.statistics import Statistics
from virtualgpu.distributed.work import CoalescedWork
from virtualgpu.engine.allocation import allocation_of, gpu_of
from virtualgpu.engine.machine import GPU, Machine


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
    communicators: "Communicators | None" = None  # of the session that it is of
    worlds = (
        0  # that this process has been in: a later one's addresses lie beside those of the first in torchrun's store
    )

    def __init__(self, store, rank: int, size: int, options=None, timeout: timedelta | None = None):
        limit = timeout or getattr(options, "_timeout", None) or timedelta(minutes=10)
        self.limit, self.settings = limit, options
        if size > 1:
            announce(store, rank)
        super().__init__(store, rank, size, timeout=limit)  # all ranks meet
        self.processes = processes(store, size) if size > 1 else []
        if self.communicators is not None:
            self.communicators.keep(self)

    @classmethod
    def create(cls, options, backend_options) -> "ProcessGroupNCCL":
        """What PyTorch's table of backends calls for a new group."""
        if not dist.is_initialized():
            ProcessGroupNCCL.worlds += 1
        store = dist.PrefixStore(f"virtualgpu/world{ProcessGroupNCCL.worlds}", options.store)
        return cls(store, options.group_rank, options.group_size, backend_options, options.timeout)

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
        self._meetings: dict[str, list[GPU]] = {}  # of a group: this rank's GPU in each, also where NCCL refused them
        self.statistics = Statistics(machine.clock)
        self._coalescing: dict[
            str, Communicator | None
        ] = {}  # groups inside of a coalescing manager, and which collects
        self._backends: dict[int, ProcessGroupNCCL] = {}  # kept, so that PyTorch finds them again
        self._launched = None  # the store in which ranks of `launch` say that they have returned

    def keep(self, backend: ProcessGroupNCCL) -> None:
        """Until all groups are destroyed: PyTorch finds the Python object again only while somebody holds it."""
        self._backends[id(backend)] = backend

    def drain(self) -> None:
        """All collectives and messages that this rank has come to are over, their ends known. Waits for other ranks."""
        for communicator in list(self.known.values()):
            communicator.drain()

    def leave(self, group=None, error: BaseException | None = None) -> None:
        """A group is about to be destroyed; None: all are. Others need not wait, and learn if an error is the cause; otherwise small messages
        that are still on their way arrive first."""
        leaving = [self.known[key] for key in list(self.known) if group is None or key[0] == group.group_name]
        for communicator in leaving:
            communicator.leave(LEFT if error is None else RAISED)
        for communicator in leaving:
            if communicator.messages is not None and error is None:
                communicator.messages.deliver()

    def end(self) -> None:
        """The process ends, perhaps by an error that nobody caught."""
        self.leave(error=getattr(sys, "last_value", None))
        self.forget()

    def forget(self, group=None) -> None:
        """A group is destroyed; None: all are."""
        for name, index in list(self.known):
            if group is None or name == group.group_name:
                self.known.pop((name, index), None)
        for name in list(self._meetings):
            if group is None or name == group.group_name:
                del self._meetings[name]
        if group is None:
            self._backends.clear()
            transport.let_go()

    def of(self, group, gpu: GPU, what: str) -> Communicator:
        """The group's communicator for that GPU; the first time, all its ranks meet, each with a GPU that is new to the group. what:
        names, in an error, what this rank has come to."""
        name = group.group_name
        communicator = self.known.get((name, gpu.index))
        if communicator is None:
            communicator = self.known[name, gpu.index] = self._meet(group, gpu, what)
        if name in self._coalescing and self._coalescing[name] is None:
            self._coalescing[name] = communicator
            communicator.begin_together()
        return communicator

    def start_coalescing(self, group) -> None:
        """Collectives of this group are collected from now on, by the communicator of the first one's tensors."""
        self._coalescing[group.group_name] = None

    def end_coalescing(self, group) -> CoalescedWork:
        """One work for all that was called since."""
        communicator = self._coalescing.pop(group.group_name, None)
        return CoalescedWork([]) if communicator is None else communicator.end_together()

    def _of_group(self, group) -> list[Communicator]:
        """Those of the GPUs that the group has used, in the order in which they were made: on all ranks the same."""
        return [communicator for (name, _), communicator in self.known.items() if name == group.group_name]

    def _meet(self, group, gpu: GPU, what: str) -> Communicator:
        rank, size = group.rank(), group.size()
        ranks = dist.get_process_group_ranks(group)
        here, backend = Where.of(self.machine, gpu), self._backend(group)
        timeout = getattr(backend, "limit", None) or _compat.timeout_of(backend) or timedelta(minutes=10)
        if _compat.is_fake(group):
            single = self.machine.single_rank
            places = [here if single is None else here._replace(node=single.node(member)) for member in ranks]
            arrivals, backend = SingleRankArrivals(rank, size), None
        else:
            try:
                arrivals, places = self._meet_others(group, gpu, here, ranks, timeout)
            except RuntimeError as error:
                explain(error, what, rank, group.group_name, ranks, timeout)
                raise
            if isinstance(backend, ProcessGroupNCCL):  # gloo's ranks may share a GPU
                one_gpu_each(places)
        return Communicator(
            self.machine, group.group_name, ranks, rank, backend, arrivals, Layout(places), gpu, timeout
        )

    def _meet_others(
        self, group, gpu: GPU, here: Where, ranks: list[int], timeout: timedelta
    ) -> tuple[Arrivals, list[Where]]:
        """All ranks of the group come here. Raises RankEnded or RankLate for one that does not."""
        rank, size = group.rank(), group.size()
        meetings = self._meetings.setdefault(group.group_name, [])
        store = dist.PrefixStore(f"virtualgpu/{len(meetings)}", _compat.store_of(group))
        meetings.append(gpu)
        known = getattr(self._backend(group), "processes", [])
        meeting = Meeting(store, size, timeout, known, lambda member: self._returned(ranks[member]))
        arrivals = Arrivals.meet(meeting, rank, size)
        try:
            meeting.set(f"virtualgpu/{arrivals.name}/{rank}", json.dumps(here.as_json()))
            keys = {f"virtualgpu/{arrivals.name}/{other}": other for other in range(size)}
            meeting.wait(keys)
            return arrivals, [Where.of_json(json.loads(meeting.get(key, other))) for key, other in keys.items()]
        finally:
            arrivals.unname()

    def meet(self, store) -> None:
        """This rank of `launch` learns there which of the others have returned."""
        self._launched = store

    def returned(self, store, rank: int) -> None:
        """This rank of `launch` has returned from its function: who waits for it need not. In the first communicator of all ranks it
        comes to one barrier more."""
        last = self._of_group(dist.group.WORLD)[:1] if dist.is_initialized() else []
        for communicator in self.known.values():
            if communicator not in last:
                communicator.arrivals.leave()
        store.set(_returned(rank), "")

    def _returned(self, rank: int) -> bool:
        return self._launched is not None and self._launched.check([_returned(rank)])

    def _backend(self, group):
        for device in ("cuda", "cpu"):
            try:
                return _compat.backend_of(group, device)
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

    def gpu_of_barrier(self, group, device_ids) -> GPU | None:
        """As ProcessGroupNCCL::barrier chooses: what the caller names, what init_process_group was told, what the group has used; or
        else by the rank's number, which is right where ranks and GPUs are in one order."""
        used = [communicator.gpu for communicator in self._of_group(group) if communicator.failed is None]
        if _compat.device_types(group) != {
            "cuda"
        }:  # gloo's: but hosts whose GPUs are used together meet on their clocks, too
            return used[0] if used else None
        name = group.group_name  # as PyTorch has it, also those that NCCL refused
        used += [gpu for gpu in self._meetings.get(name, ()) if (name, gpu.index) not in self.known]
        device = getattr(group, "bound_device_id", None)
        if device_ids:
            return self.machine.gpu(device_ids[0])
        if device is not None:
            return self.machine.gpu(device)
        if used:
            return used[0]
        return self.machine.gpu(dist.get_rank() % len(self.machine.look()))

    def place(self, group, tensors: Sequence[torch.Tensor]) -> GPU | None:
        """The GPU of these tensors: those that C++ made without saying where (a bucket of DDP) get it. None for the CPU's, where the
        group has a backend for them. Raises NCCL's error where it has none, and ValueError for several GPUs."""
        gpu, elsewhere = None, []
        for tensor in tensors:
            its_gpu = gpu_of(tensor)
            if its_gpu is None:
                elsewhere.append(tensor)
            elif gpu is None:
                gpu = its_gpu
            elif its_gpu != gpu:
                gpus = sorted(map(str, (gpu, its_gpu)))
                raise ValueError(f"Expected all tensors of a collective on one device, but found {gpus}")
        if gpu is not None:
            gpu = self.machine.own(gpu)
            if "cuda" not in _compat.device_types(group) and not self.foreign(group):
                raise RuntimeError("No backend type associated with device type cuda")
        elif not elsewhere:
            return None
        elif "cuda" in _compat.device_types(group) and all(map(_made_by_cpp, elsewhere)):
            gpu = self.machine.gpu("cuda")
        elif _compat.device_types(group) == {"cuda"}:
            raise RuntimeError("No backend type associated with device type cpu")
        else:
            return None
        for tensor in elsewhere:
            self.machine.place(tensor, gpu)
        return gpu


def _made_by_cpp(tensor: torch.Tensor) -> bool:
    allocation = allocation_of(tensor)
    return allocation is not None and allocation.gpu is None


def _returned(rank: int) -> str:
    return f"virtualgpu/returned/{rank}"
