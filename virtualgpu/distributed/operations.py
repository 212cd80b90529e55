"""What the dispatch mode does with operations of c10d, with functional collectives and with DTensor's own; and the communicators behind all groups.

As with NCCL a communicator is made at the first collective of tensors of a GPU: a rank that uses two GPUs in one group has two.
"""

import atexit
import functools
import json
import sys
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist

from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import is_really_meta, packet, schema
from virtualgpu.distributed import p2p, transport
from virtualgpu.distributed.calls import refused_by_nccl
from virtualgpu.distributed.collectives import FUNCTIONS, OPERATIONS
from virtualgpu.distributed.communicator import CoalescedWork, Communicator, Statistics
from virtualgpu.distributed.message_log import RECV, SEND
from virtualgpu.distributed.process_group import ProcessGroupNCCL
from virtualgpu.distributed.shared_clock import LEFT, RAISED, Arrivals, Meeting, SingleRankArrivals, explain
from virtualgpu.distributed.topology import Layout, Where
from virtualgpu.engine import overrides
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import allocation_of, gpu_of, storage_of
from virtualgpu.engine.values import invalidate
from virtualgpu.environment import bus_id
from virtualgpu.torch_api.patches import Patches

RETURNED = "virtualgpu/returned"  # in the store of `launch`
ALONE = frozenset({"cuda"})  # device types of a group that knows no CPU


class GroupKind(NamedTuple):
    """Of a process group. device_types: for which it has a backend. foreign: is that one that somebody wrote (PyTorch's tests have one of
    threads)? It carries the numbers as it does for CPU tensors; how long it takes is not known."""

    device_types: frozenset[str]
    foreign: bool


class Communicators:
    """Of this process, by the names of their groups and the GPU (its index) that the tensors are on."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.known: dict[tuple[str, int], Communicator] = {}
        self._meetings: dict[str, list[GPU]] = {}  # of a group: this rank's GPU in each, also where NCCL refused them
        self.statistics = Statistics(machine.clock)
        # Groups inside of a coalescing manager, and which communicator collects
        self._coalescing: dict[str, Communicator | None] = {}
        self.kinds: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each group
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
                self.known.pop((name, index)).close()
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
            communicator.begin_coalescing()
        return communicator

    def start_coalescing(self, group) -> None:
        """Collectives of this group are collected from now on, by the communicator of the first one's tensors."""
        self._coalescing[group.group_name] = None

    def end_coalescing(self, group) -> CoalescedWork:
        """One work for all that was called since."""
        communicator = self._coalescing.pop(group.group_name, None)
        return CoalescedWork([]) if communicator is None else communicator.end_coalescing()

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
            arrivals: Arrivals = SingleRankArrivals(rank, size)
            backend = None
        else:
            try:
                arrivals, places = self._meet_others(group, gpu, here, ranks, timeout)
            except RuntimeError as error:
                explain(error, what, rank, group.group_name, ranks, timeout)
                raise
            if isinstance(backend, ProcessGroupNCCL):  # gloo's ranks may share a GPU
                one_gpu_each(places)
        layout = Layout(places)
        return Communicator(self.machine, group.group_name, ranks, rank, backend, arrivals, layout, gpu, timeout)

    def _meet_others(self, group, gpu: GPU, here: Where, ranks: list[int], timeout: timedelta):
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
        store.set(f"{RETURNED}/{rank}", "")

    def _returned(self, rank: int) -> bool:
        return self._launched is not None and self._launched.check([f"{RETURNED}/{rank}"])

    def _backend(self, group):
        for device in ("cuda", "cpu"):
            try:
                return _compat.backend_of(group, device)
            except RuntimeError:
                continue
        return None

    def kind(self, group) -> GroupKind:
        """Asked once of each group."""
        kind = self.kinds.get(group)
        if kind is None:
            foreign = type(group) is not _compat.ProcessGroup  # written in Python as a whole
            if not foreign and not isinstance(backend := self._backend(group), ProcessGroupNCCL):
                foreign = type(backend).__module__ not in _compat.OF_PYTORCH
            kind = self.kinds[group] = GroupKind(_compat.device_types(group), foreign)
        return kind

    def gpu_of_barrier(self, group, device_ids) -> GPU | None:
        """As ProcessGroupNCCL::barrier chooses: what the caller names, what init_process_group was told, what the group has used; or
        else by the rank's number, which is right where ranks and GPUs are in one order."""
        used = [communicator.gpu for communicator in self._of_group(group) if communicator.failed is None]
        if self.kind(group).device_types != ALONE:
            return used[0] if used else None  # gloo's: but hosts whose GPUs are used together meet on their clocks, too
        name = group.group_name  # as PyTorch has it, also those that NCCL refused
        used += [gpu for gpu in self._meetings.get(name, ()) if (name, gpu.index) not in self.known]
        device = device_ids[0] if device_ids else getattr(group, "bound_device_id", None)
        if device is None and used:
            return used[0]
        return self.machine.gpu(dist.get_rank() % len(self.machine.look()) if device is None else device)

    def place(self, group, tensors: Sequence[torch.Tensor]) -> GPU | None:
        """The GPU of these tensors: those that C++ made without saying where (a bucket of DDP) get it. None for the CPU's, where the
        group has a backend for them. Raises NCCL's error where it has none, and ValueError for several GPUs."""
        gpu, elsewhere, (device_types, foreign) = None, [], self.kinds.get(group) or self.kind(group)
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
            if self.machine.forked or gpu.machine is not self.machine:
                self.machine.own(gpu)  # raises
            if "cuda" not in device_types and not foreign:
                raise RuntimeError("No backend type associated with device type cuda")
        elif not elsewhere:
            return None
        elif "cuda" in device_types and all(allocation_of(tensor) is not None for tensor in elsewhere):  # made by C++
            gpu = self.machine.gpu("cuda")
        elif device_types == ALONE:
            raise RuntimeError("No backend type associated with device type cpu")
        else:
            return None
        for tensor in elsewhere:
            self.machine.place(tensor, gpu)
        return gpu


def one_gpu_each(ranks: list[Where]) -> None:
    """Raises NCCL's error (src/init.cc) where two ranks use one GPU: most often nobody called torch.cuda.set_device."""
    for rank, where in enumerate(ranks):
        for other in range(rank):
            if where.card and (where.node, where.card) == (ranks[other].node, ranks[other].card):
                bus = bus_id(int(where.card.split()[-1]))
                raise refused_by_nccl(
                    "NCCLUtils.cpp:93",
                    "invalid usage",
                    "This usually reflects invalid usage of NCCL library.",
                    f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {bus}: NCCL takes one GPU for each rank. "
                    "Call torch.cuda.set_device(local_rank) first, or start as many ranks as there are GPUs",
                )


# -- What the dispatch mode does with operations of c10d, and with functional collectives.


WORK = "_virtual_work"  # on the storage of a functional collective's result: the collective that fills it
MESSAGES = {"send": (SEND, "send to"), "recv_": (RECV, "recv from"), "recv_any_source_": (RECV, "recv from")}


@functools.cache
def _names(func) -> tuple[str, ...]:
    """Of an operation's arguments."""
    return tuple(argument.name for argument in schema(func).arguments)


def of_c10d(dispatch, func, args, kwargs):
    """An operation of c10d."""
    machine, communicators = dispatch.machine, dispatch.machine.communicators
    name = packet(func).__name__
    values = {**dict(zip(_names(func), args, strict=False)), **kwargs}
    group = values["process_group"]
    if not isinstance(group, _compat.ProcessGroup):
        group = _compat.unboxed(group)
    if name in OPERATIONS and not values.get("tensors"):
        _check_for_tensors(func, values)
    if (communicators.kinds.get(group) or communicators.kind(group)).foreign:
        with machine.untracked():
            return func(*args, **kwargs)
    if name in MESSAGES:
        return _message(communicators, name, group, func, args, kwargs)
    if name not in OPERATIONS:
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
    return (args[0], work) if len(schema(func).returns) > 1 else work  # tensors, too


def _check_for_tensors(func, values: Mapping) -> None:
    """The dispatcher's own error where nothing says on which device the collective is. It does not look into lists of lists."""
    for value in values.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                return
    raise NotImplementedError(
        "There were no tensor arguments to this function (e.g., you passed an empty list of Tensors), but no fallback "
        f"function is registered for schema {schema(func).name}."
    )


def _message(communicators: Communicators, name: str, group, func, args, kwargs):
    tensors, peer = args[0], args[2]
    gpu = communicators.place(group, tensors)
    if gpu is None:
        return func(*args, **kwargs)
    if name == "recv_any_source_":
        raise RuntimeError("recv from any source is not there with NCCL: name the rank, src=")
    direction, verb = MESSAGES[name]
    communicator = communicators.of(group, gpu, f"{verb} rank {dist.get_global_rank(group, peer)}")
    return p2p.come_to(communicator, direction, peer, tensors[0], gpu).boxed()


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
        return _compat.async_tensor()(args[0])  # as the operation; its kernel for shapes alone makes a new tensor
    values = {**dict(zip(_names(func), args, strict=False)), **kwargs}
    if name not in FUNCTIONS or values.get("group_name") is None:
        return func(*args, **kwargs)
    group = _group(values["group_name"])
    inputs = values["inputs"] if "inputs" in values else [values["input"]]
    if communicators.place(group, inputs) is None:
        return func(*args, **kwargs)
    if communicators.kind(group).foreign:
        with machine.untracked():
            out = func(*args, **kwargs)
        for result in out if isinstance(out, list) else [out]:
            if gpu_of(result) is None:
                machine.place(result, gpu_of(inputs[0]))
        return out
    collective, make = FUNCTIONS[name]
    with dispatch:
        filled = [make(collective, tensor, values, group.size()) for tensor in inputs]
    for out, call in filled:
        gpu = communicators.place(group, call.tensors)
        work = communicators.of(group, gpu, call.kind).start(call, gpu, True)
        setattr(storage_of(out), WORK, work)
    results = [out for out, _ in filled]
    return results if "inputs" in values else results[0]


def of_dtensor(dispatch, func, args, kwargs):
    """A DTensor's shards of one dimension become those of another: an all_to_all and its wait, as PyTorch's C++ makes it."""
    communicators = dispatch.machine.communicators
    values = {**dict(zip(_names(func), args, strict=False)), **kwargs}
    if packet(func).__name__ != "shard_dim_alltoall":
        return func(*args, **kwargs)
    tensor, name = values["input"], values["group_name"]
    group = _group(name)
    if communicators.place(group, [tensor]) is None:
        return func(*args, **kwargs)
    if communicators.kind(group).foreign:
        with dispatch.machine.untracked():
            return dispatch.machine.place(func(*args, **kwargs), gpu_of(tensor))
    functional, ones = torch.ops._c10d_functional, [1] * group.size()
    with dispatch:
        parts = torch.stack(tensor.chunk(group.size(), values["shard_dim"]))
        parts = functional.wait_tensor(functional.all_to_all_single(parts, ones, ones, name))
        return torch.cat(parts.unbind(), values["gather_dim"])


def _group(name):
    return _compat.named(name) if isinstance(name, str) else _compat.group_of(name)


def wait(tensor: torch.Tensor) -> None:
    """The current stream waits for the collective that fills this tensor."""
    storage = storage_of(tensor)
    work = getattr(storage, WORK, None)
    if work is not None:
        delattr(storage, WORK)
        work.wait()


# -- torch.distributed with virtual GPUs on: nccl is there, and operations of c10d on GPU tensors are ours.


def install(machine: Machine, patches: Patches) -> None:
    """All that this package replaces; nothing where PyTorch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return
    from virtualgpu.distributed import dtensor, parallel, process_group

    machine.communicate_by(Communicators(machine))
    overrides.register_namespace("c10d", of_c10d)
    overrides.register_namespace("_c10d_functional", of_functional)
    overrides.register_namespace("_dtensor", of_dtensor)
    if (maker := _compat.make_premul_sum) is not None:
        patches.stand_in_everywhere(dist, maker.__name__, _compat.premul_sum)
    atexit.register(machine.communicators.end)  # gloo's threads must not outlive the interpreter
    patches.undo(lambda: atexit.unregister(machine.communicators.end))
    for module in (process_group, parallel, dtensor):
        module.install(machine, patches)
