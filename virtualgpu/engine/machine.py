"""All virtual GPUs of a process, the clock they share, which one is current, and what each thread is doing with them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from virtualgpu import _compat
from virtualgpu.engine.frames import initializes, warn_at_the_program
from virtualgpu.engine.gpu import CONTEXT, GPU, Workspaces
from virtualgpu.engine.storage import (
    ALLOCATION,
    Allocation,
    InFlight,
    gpu_of,
    set_allocation,
    storage_of,
    stream_of_leaf,
)
from virtualgpu.environment import DRY_HAS_NO_VALUES, launch_blocking
from virtualgpu.errors import forked, invalid_ordinal, no_gpus, used_before_fork
from virtualgpu.hardware import datasheet
from virtualgpu.hardware.datasheet import Link
from virtualgpu.hardware.machine import DATASHEET, HOSTS, MachineSettings, Network
from virtualgpu.hardware.specs import Spec
from virtualgpu.memory.ledger import Ledger
from virtualgpu.timing.clock import Clock

__all__ = ["ALLOCATION", "CONTEXT", "GPU", "Allocation", "Machine", "gpu_of", "storage_of"]

# -- What each thread is doing with the virtual GPUs.
#
# A dry run holds for the thread that is in it, and for the threads and a pool's work that it starts meanwhile, but not for others: two
# threads may have dry runs that overlap, or one a dry run while another computes with numbers. It also outlives a call of gpus(), so it is
# kept for the process; everything else is kept for one machine.


class ThreadContext(threading.local):
    """One thread's, on one machine.

    current: torch.cuda.current_device(). seen: the machine whose dispatch mode the thread has. bypass, nccl, target, counts, replicas:
    set by the blocks below.
    """

    current: int = 0
    seen = None
    bypass: bool = False
    nccl: bool = False
    target = None  # a GPU
    counts: bool = False
    replicas: int = 1

    def saw(self, machine) -> None:
        """See `seen`."""
        self.seen = machine

    def use_device(self, index: int) -> None:
        """torch.cuda.set_device, unchecked."""
        self.current = index

    def untracked(self) -> contextlib.AbstractContextManager[None]:
        """Operations in here are the bookkeeper's own: no place, no memory, no time, and devices are what they really are."""
        return self._while("bypass", True)

    def by_nccl(self) -> contextlib.AbstractContextManager[None]:
        """Copies in here are NCCL's: whoever asked for them books their time."""
        return self._while("nccl", True)

    def made_on(self, gpu) -> contextlib.AbstractContextManager[None]:
        """What C++ makes in here "on the CPU" is this GPU's: its options came from that GPU's tensors."""
        return self._while("target", gpu)

    def counted_by_cpp(self) -> contextlib.AbstractContextManager[None]:
        """What C++ asks room for in here, it writes itself (lengths): a dry run gives it memory."""
        return self._while("counts", True)

    def replicating(self, replicas: int) -> contextlib.AbstractContextManager[None]:
        """Threads that are started in here are so many that do the same, while this one waits for them."""
        return self._while("replicas", replicas)

    @contextlib.contextmanager
    def _while(self, name: str, value) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)


class _Dry(threading.local):
    dry: bool | None = None  # None: as all of the machine's threads


class DryRuns:
    """The process's threads that are in a dry run. some: is there one? epoch: changes each time the last of them ends."""

    def __init__(self):
        self.some, self.epoch = False, 1
        self._count, self._lock, self.thread = 0, threading.Lock(), _Dry()

    @property
    def here(self) -> bool | None:
        """Does this thread work on shapes alone? None: as all of the machine's threads."""
        return self.thread.dry

    @contextlib.contextmanager
    def set_here(self, dry: bool | None) -> Iterator[None]:
        """In this block this thread works on shapes alone (True), with numbers (False), or as all of the machine's threads (None)."""
        thread = self.thread
        before, thread.dry = thread.dry, dry
        self._add(bool(dry))
        try:
            yield
        finally:
            thread.dry = before
            self._add(-bool(dry))

    def _add(self, step: int) -> None:
        with self._lock:
            self._count = max(0, self._count + step)  # a forked process may leave a block that its parent entered
            before, self.some = self.some, self._count > 0
            self.epoch += before and not self.some

    def begin_anew(self) -> None:
        """In a process that was just forked: its one thread computes with numbers."""
        self._count, self._lock, self.thread = 0, threading.Lock(), _Dry()
        self.some, self.epoch = False, self.epoch + 1


dry_runs = DryRuns()


# -- All the virtual GPUs.


# From the end of a kernel to the beginning of the next in its stream: kernels of 2.9 us come every 3.8 us on a V100 that has enough of them to do
# (NVIDIA, "Getting Started with CUDA Graphs", 2019; 3.4 us in a graph)
GAP = 0.9e-6


class Machine:
    """All the virtual GPUs, the clock they share, and which one is current. Threads have their own current device.

    local: what the thread that asks is doing. always_dry: are all threads in a dry run? initialized: somebody has used a GPU
    (torch.cuda.is_initialized). forked: this process was forked from one that had. ledger: shared with the other processes of a run.
    real_gpus: how many real ones there are beside these. single_rank: the rank that this process plays alone
    (distributed.topology.RankConfig). timers: what time.time() and its kind
    tell the program: simulated, real, or warn (real, and a warning says so once). communicators: of process groups. in_flight: numbers that these have on their way.
    """

    def __init__(
        self,
        specs: list[Spec],
        visible: list[int] | None = None,
        settings: MachineSettings = MachineSettings(),  # noqa: B008
        enter: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
    ):
        """enter, leave: the thread that calls it sees the GPUs from then on, or no longer."""
        self.specs, self.settings = specs, settings
        self.visible = list(range(len(specs))) if visible is None else visible
        costs = HOSTS[settings.host]
        self.clock = Clock(len(self.visible), costs=costs, on_wait=self._note_time, stream_of_leaf=stream_of_leaf)
        self.clock.set(gap=GAP)
        self.gpus = self._make_gpus()
        self.ledger: Ledger | None = None
        self.cached_by_dry_run = False
        self.single_rank = None
        self.communicators: Any = None  # distributed.operations.Communicators
        self.always_dry = False
        self.real_gpus = 0
        self.initialized = self.forked = self.closed = False
        self.enter, self.leave = enter, leave
        self.choose: Callable[[], list[int]] | None = None
        self._on_first_use: list[Callable[[], None]] = []
        self.timers = "warn"
        self._warns_of_nan = True
        self.workspaces = Workspaces()
        self.local = ThreadContext()
        self.in_flight = InFlight()

    def _make_gpus(self) -> list[GPU]:
        return [GPU(index, self.specs[physical], self, physical) for index, physical in enumerate(self.visible)]

    def choose_by(self, choose: Callable[[], list[int]] | None) -> None:
        """Until a GPU is used, `choose` says which of the cards there are (CUDA_VISIBLE_DEVICES)."""
        self.choose = choose

    def look(self) -> list[GPU]:
        """The GPUs, as CUDA_VISIBLE_DEVICES says now; after the first use, as it said then."""
        if self.choose is not None and not self.initialized and (visible := self.choose()) != self.visible:
            self.visible = visible
            self.clock.reset(len(visible))
            self.gpus = self._make_gpus()
            if self.ledger is not None:
                self.share(self.ledger)
        return self.gpus

    def share(self, ledger: Ledger) -> None:
        """Keep account together with other processes on the same GPUs: what each holds, and how busy it was."""
        self.ledger = ledger
        for gpu in self.gpus:
            gpu.share(ledger)

    def _note_time(self) -> None:
        if self.ledger is None:
            return
        now, busy, computing = self.clock.latest(), self.clock.busy, self.clock.computing
        for gpu in self.gpus:
            if busy[gpu.index]:
                self.ledger.time(gpu.physical, busy[gpu.index], now, computing[gpu.index])

    def connect(self, network: Network | None) -> Network | None:
        """Join the nodes by another network. Returns the one before."""
        before, self.settings = self.settings.network, replace(self.settings, network=network)
        return before

    def play(self, rank) -> None:
        """Play this rank of many alone, or no rank any more (None)."""
        self.single_rank = rank

    def stand_beside(self, real_gpus: int) -> None:
        """So many real GPUs are there, too, hidden as long as these are on; what lies on them does not meet what lies on these."""
        self.real_gpus = real_gpus

    def is_on_real_gpu(self, tensor: torch.Tensor) -> bool:
        """Was it made before these GPUs were on, or by a thread that does not see them?"""
        return self.real_gpus > 0 and _compat.is_really_on_gpu(tensor)

    def communicate_by(self, communicators) -> None:
        """Process groups on these GPUs are kept there; who waits for a GPU waits for their collectives, too."""
        self.communicators = communicators
        self.clock.collectives.settle_by(communicators.drain)

    def untracked(self) -> contextlib.AbstractContextManager[None]:
        """Operations in here are the bookkeeper's own: see `ThreadContext`."""
        return self.local.untracked()

    def leaves_cached(self, by_dry_run: bool) -> None:
        """A dry run has ended, which may have left memory cached (`cached_by_dry_run`); or that memory was given back."""
        self.cached_by_dry_run = by_dry_run

    @property
    def some_dry(self) -> bool:
        """Is a thread in a dry run?"""
        return self.always_dry or dry_runs.some

    @property
    def dry(self) -> bool:
        """Does this thread work on shapes alone? A thread of C++ that autograd started (it has our mode, and never entered) does where
        some thread does."""
        if not (self.always_dry or dry_runs.some):
            return False
        here = dry_runs.thread.dry
        if here is not None:
            return here
        return self.always_dry or self.local.seen is None

    def be_dry(self, always: bool) -> None:
        """All threads work on shapes alone, but where they say otherwise: the runner's --dry."""
        self.always_dry = always

    def warn_of_nan(self, why: str) -> None:
        """A value was read in a dry run, which has none: a warning, once."""
        if self._warns_of_nan and not initializes():
            self._warns_of_nan = False
            warn_at_the_program(
                f"{DRY_HAS_NO_VALUES}: what it reads is nan (0 for whole numbers, False for booleans, True for all())"
                + (f"; here because {why}" if why else "")
            )

    @contextlib.contextmanager
    def silent_about_nan(self) -> Iterator[None]:
        """What is read in here is not the program's to be warned of."""
        before, self._warns_of_nan = self._warns_of_nan, False
        try:
            yield
        finally:
            self._warns_of_nan = before

    @property
    def base(self) -> str:
        """The device that tensors are really on: "cpu" with numbers, "meta" in a dry run."""
        return "meta" if self.dry else "cpu"

    def gpu(self, device) -> GPU | None:
        """The GPU for a device, a name ("cuda:1"), an index, or None (the current GPU); None for the CPU.

        Raises the error of PyTorch for a GPU that is not there.
        """
        if device is None or (isinstance(device, int) and not isinstance(device, bool)):
            index = self.local.current if device is None else device
        else:
            if isinstance(device, torch.cuda.device):
                return self.gpu(device.idx)
            device = torch.device(device)
            if device.type == "cpu":
                return None
            if device.type != "cuda":
                count = len(self.gpus)
                devices = ("cpu", "cpu and cuda:0", f"cpu and cuda:0 to cuda:{count - 1}")[min(count, 2)]
                raise NotImplementedError(
                    f"virtual GPUs know the devices {devices}, not {str(device)!r}: write device='cuda'"
                )
            index = self.local.current if device.index is None else device.index
        if not 0 <= index < len(self.look()):
            raise invalid_ordinal() if self.gpus else no_gpus()
        if not self.initialized or self.forked or self.local.seen is not self:
            self.use()
        return self.gpus[index]

    def expect_gpu(self, device=None) -> GPU:
        """As `gpu`, where no CPU can be meant: that raises PyTorch's ValueError."""
        gpu = self.gpu(device)
        if gpu is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return gpu

    def use(self) -> None:
        """Somebody uses a GPU. Raises PyTorch's error in a process that was forked from one that had."""
        if self.forked:
            raise forked()
        if self.local.seen is not self and not self.closed and self.enter is not None:
            self.enter()
        if not self.initialized:
            self.initialize()

    def read_timers(self, kind: str) -> None:
        """See `timers`."""
        self.timers = kind

    def call_on_first_use(self, function: Callable[[], None]) -> None:
        """`function` is called before the first use of a GPU, once."""
        self._on_first_use.append(function)

    def initialize(self) -> None:
        """CUDA begins, if it has not: what it reads once is read."""
        if not self.initialized:
            self.initialized = True
            self.clock.set(blocking=launch_blocking())
            for function in self._on_first_use:
                function()

    def after_fork(self) -> None:
        """In the forked child: GPUs that its parent used cannot be used."""
        self.forked = self.initialized

    def close(self) -> None:
        """Virtual GPUs go off."""
        self.closed = True
        self.local.saw(None)

    def reopen(self) -> None:
        """It was closed, and is used again."""
        self.closed = False

    def own(self, gpu: GPU) -> GPU:
        """That GPU, if it is still one of these. Raises RuntimeError for one that a later call of gpus() replaced, and CUDA's error for
        one of the process that this was forked from."""
        if self.forked:
            raise used_before_fork()
        if gpu.machine is not self:
            raise RuntimeError(
                f"this tensor lives on {gpu.device} of virtual GPUs that a later call of gpus() replaced; make it again"
            )
        return gpu

    def charge_copy(
        self, source: GPU | None, target: GPU | None, nbytes: int, non_blocking: bool = False, pinned: bool = False
    ) -> None:
        """The time of a copy between two places. pinned: is the host's memory? Only then does non_blocking leave the host free; otherwise it
        is CUDA that waits (cudaMemcpyAsync), of which PyTorch does not know (copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu)."""
        if self.local.nccl:
            return
        wait = not (non_blocking and pinned)
        if source is not None and target is not None:
            link = datasheet.between(source.spec, target.spec, promised=self.settings.clock == DATASHEET)
            self.clock.between(source.index, target.index, link.seconds(nbytes))
        elif target is not None:
            seconds = self.host_link(target, "in", pinned).seconds(nbytes)
            self.clock.host_copy(target.index, seconds, wait, "copy from the host", "in", not non_blocking)
        elif source is not None:
            seconds = self.host_link(source, "out", pinned).seconds(nbytes)
            self.clock.host_copy(source.index, seconds, wait, "copy to the host", "out", not non_blocking)

    def host_link(self, gpu: GPU, way: str, pinned: bool) -> Link:
        """What copies from the host ("in") or to it ("out") reach."""
        return gpu.spec.host if self.settings.clock == DATASHEET else datasheet.to_host(gpu.spec.host, way, pinned)

    def place(self, tensor: torch.Tensor, gpu: GPU | None) -> torch.Tensor:
        """Let this tensor's storage live on `gpu`. Raises torch.OutOfMemoryError where there is no room."""
        self.place_storage(storage_of(tensor), gpu)
        return tensor

    def place_storage(self, storage, gpu: GPU | None):
        """As `place`; returns the storage. None for `gpu`: the CPU; the bytes that it had on a GPU are given back."""
        set_allocation(storage, None if gpu is None else Allocation(gpu, storage.nbytes()))
        return storage
