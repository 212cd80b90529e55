"""The virtual GPUs themselves: the memory of each, the clock they share, and which one is current."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterator
from uuid import UUID

import torch

from virtualgpu.engine.home import HOME, Home, gpu_of, storage_of
from virtualgpu.engine.in_thread import Anywhere, here
from virtualgpu.engine.workspaces import Workspaces
from virtualgpu.environment import launch_blocking, uuid
from virtualgpu.errors import CUDNN_HANDLE, cudnn_not_initialized, forked, invalid_ordinal, no_gpus
from virtualgpu.hardware.hosts import DATASHEET, HOSTS, ClockSettings
from virtualgpu.hardware.networks import Network
from virtualgpu.hardware.specs import MIB, Spec
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.ledger import Ledger
from virtualgpu.simulation.clock import Clock
from virtualgpu.simulation.kernels import Kernels

# What a process's CUDA context takes of a GPU before its first tensor: 102 MiB on Colab's T4 (nvidia-smi, CUDA 12).
CONTEXT = 102 * MIB

__all__ = ["CONTEXT", "GPU", "HOME", "Home", "Machine", "gpu_of", "storage_of"]


class GPU:
    """One virtual GPU: its spec, its memory, its place in the clock.

    index: CUDA's number of it. physical: the machine's, which CUDA_VISIBLE_DEVICES may have changed.
    """

    def __init__(self, index: int, spec: Spec, machine: "Machine", physical: int | None = None):
        self.index, self.spec, self.machine = index, spec, machine
        self.physical = index if physical is None else physical
        self.device = torch.device("cuda", index)
        self.kernels = Kernels(spec, peak=machine.clock_settings.rates == DATASHEET)
        # a GPU made very small for a lesson keeps its memory for the lesson
        context = CONTEXT if spec.memory > 8 * CONTEXT else 0
        self.lock = threading.RLock()
        self.memory = CachingAllocator(spec.memory, index, context, timeline=_Timeline(machine.clock, index))
        self.uuid = UUID(uuid(self.physical).removeprefix("GPU-"))
        self.cudnn = False  # has its handle
        self.workspaces: dict = {}  # of cuBLAS, that handles keep
        self.makes_workspace = False  # is what asks for memory now cuBLAS?
        self._freed: deque = deque()

    def malloc(self, nbytes: int):
        """A block of memory on the current stream. Raises torch.OutOfMemoryError as PyTorch would."""
        clock = self.machine.clock
        stream = clock.current(self.index).id if clock.multi else 0  # as `stream`, written out for speed
        with self.lock:
            while self._freed:
                self.memory.free(*self._freed.popleft())
            return self.memory.malloc(nbytes, stream)

    def malloc_workspace(self, nbytes: int):
        """As `malloc`, for cuBLAS."""
        with self.lock:
            self.makes_workspace = True
            try:
                return self.malloc(nbytes)
            finally:
                self.makes_workspace = False

    def lend_workspace(self, nbytes: int) -> None:
        """Memory for cuBLAS, for the length of one call."""
        stream = self.stream
        with self.lock:
            self._collect()
            self.makes_workspace = True
            try:
                self.memory.lend(nbytes, stream)
            finally:
                self.makes_workspace = False

    @property
    def stream(self) -> int:
        """The id of the current stream."""
        clock = self.machine.clock
        return clock.current(self.index).id if clock.multi else 0

    def require(self, nbytes: int | list[int]) -> None:
        """Raises torch.OutOfMemoryError where a block of that size, or blocks of these, cannot be had; nothing is taken."""
        with self.lock:
            self._collect()
            self.memory.require(nbytes, self.machine.clock.current(self.index).id)

    def free(self, block) -> None:
        """Only noted here: a destructor may run in the middle of malloc. Streams that use the block are asked for their time now."""
        ends = None
        if block.streams:
            clock = self.machine.clock
            ends = {stream: clock.stream(self.index, stream).ready for stream in block.streams}
        history = self.memory.history
        self._freed.append((block, ends, history.gather(freeing=True) if history else None))

    def drop_pool(self, id: tuple[int, int]) -> None:
        """A MemPool has gone. Only noted here, as a free is: its destructor, too, may run in the middle of malloc."""
        self._freed.append((None, None, None, id))

    def settled(self) -> CachingAllocator:
        """The allocator with every free carried out, for whoever reads figures."""
        with self.lock:
            self._collect()
        return self.memory

    def use_cudnn(self) -> None:
        """The first convolution makes cuDNN's handle, which cannot use what PyTorch keeps reserved. Raises RuntimeError without room."""
        if self.settled().free_on_gpu < CUDNN_HANDLE:
            raise cudnn_not_initialized()
        self.cudnn = True

    def _collect(self) -> None:
        while self._freed:
            self.memory.free(*self._freed.popleft())

    def __repr__(self) -> str:
        return f"cuda:{self.index} ({self.spec.name}, virtual)"


class _Timeline:
    """What the allocator asks about time."""

    def __init__(self, clock: Clock, gpu: int):
        self.clock, self.gpu = clock, gpu

    def now(self) -> float:
        return self.clock.host

    def ready(self, stream: int) -> float:
        return self.clock.stream(self.gpu, stream).ready

    def wait_until(self, moment: float) -> None:
        self.clock.wait_until(moment)


class Machine(Anywhere):
    """All the virtual GPUs, the clock they share, and which one is current. Threads have their own current device.

    some_dry, always_dry: is a thread, are all threads in a dry run? See `dry`. initialized: somebody has used a GPU (torch.cuda.is_initialized). forked: this process
    was forked from one that had. on_first_use: called once, before the first use of a GPU. choose: says which of the cards
    CUDA_VISIBLE_DEVICES leaves, until a GPU is used. ledger: shared with the other processes of a run. gpus_per_node: how the cards are
    divided into nodes; None: they are one. network: what joins nodes; None: what PyTorch's model has for the card.
    """

    def __init__(
        self,
        specs: list[Spec],
        visible: list[int] | None = None,
        clock_settings: ClockSettings = ClockSettings(),  # noqa: B008
    ):
        self.specs, self.choose, self.clock_settings = specs, None, clock_settings
        self.ledger: Ledger | None = None
        self.alone = None  # the rank that this process plays alone (distributed.alone.Place)
        self.gpus_per_node: int | None = None
        self.network: Network | None = None
        self.communicators = None  # of process groups: virtualgpu.distributed puts them here
        self._equip(list(range(len(specs))) if visible is None else visible)
        self.always_dry = False
        self.initialized = self.forked = self.closed = False
        self.enter = None  # lets the thread that calls it see the GPUs
        self.on_first_use = None
        self.warned_about_nan = False
        self.workspaces = Workspaces()
        self.asked: dict = {}  # when somebody last asked for a GPU's load, and its busy time then
        self.local = _PerThread()

    def _equip(self, which: list[int]) -> None:
        self.visible = which
        clock = getattr(self, "clock", None)
        if clock is None:
            self.clock = Clock(len(which), costs=HOSTS[self.clock_settings.host])
        else:  # others have it already
            clock.__init__(len(which), clock.blocking, clock.costs)
        self.gpus = [GPU(index, self.specs[physical], self, physical) for index, physical in enumerate(which)]

    def look(self) -> list[GPU]:
        """The GPUs, as CUDA_VISIBLE_DEVICES says now; after the first use, as it said then."""
        if self.choose is not None and not self.initialized and (which := self.choose()) != self.visible:
            self._equip(which)
            if self.ledger is not None:
                self.share(self.ledger)
        return self.gpus

    def share(self, ledger: Ledger) -> None:
        """Keep account together with other processes on the same GPUs: what each holds, and how busy it was."""
        self.ledger = ledger
        for gpu in self.gpus:
            with gpu.lock:  # another thread's malloc asks both, or none
                gpu.memory.exclusive = ledger.lock
                gpu.memory.others = functools.partial(ledger.others, gpu.physical)
                gpu.memory.on_reserved = functools.partial(self._note_reserved, gpu)
        self.clock.on_wait = self._note_time

    def _note_reserved(self, gpu: GPU, memory) -> None:
        held = memory.reserved + memory.context
        self.ledger.note(gpu.physical, held, memory.peak_allocated, memory.peak_reserved)

    def _note_time(self) -> None:
        now, busy, computing = self.clock.latest(), self.clock.busy, self.clock.computing
        for gpu in self.gpus:
            if busy[gpu.index]:
                self.ledger.time(gpu.physical, busy[gpu.index], now, computing[gpu.index])

    @contextlib.contextmanager
    def _in_this_thread(self, name: str, value) -> Iterator[None]:
        before = getattr(self.local, name)
        setattr(self.local, name, value)
        try:
            yield
        finally:
            setattr(self.local, name, before)

    def untracked(self) -> contextlib.AbstractContextManager[None]:
        """Operations in here are the bookkeeper's own: no place, no memory, no time, and devices are what they really are."""
        return self._in_this_thread("bypass", True)

    def by_nccl(self) -> contextlib.AbstractContextManager[None]:
        """Copies in here are NCCL's: whoever asked for them books their time."""
        return self._in_this_thread("by_nccl", True)

    def made_on(self, gpu: GPU | None) -> contextlib.AbstractContextManager[None]:
        """What C++ makes in here "on the CPU" is this GPU's: its options came from that GPU's tensors."""
        return self._in_this_thread("made_on", gpu)

    def counted_by_cpp(self) -> contextlib.AbstractContextManager[None]:
        """What C++ asks room for in here, it writes itself (lengths): a dry run gives it memory."""
        return self._in_this_thread("counts", True)

    @property
    def dry(self) -> bool:
        """Does this thread work on shapes alone? A thread of C++ that autograd started (it has our mode, and never entered) does where
        some thread does."""
        if not self.some_dry:
            return False
        if here.dry is not None:
            return here.dry
        return self.always_dry or self.local.seen is None

    def be_dry(self, always: bool) -> None:
        """All threads work on shapes alone, but where they say otherwise: the runner's --dry."""
        self.always_dry = always
        if always:
            self.some_dry = True
        else:
            vars(self).pop("some_dry", None)

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
                raise NotImplementedError(
                    f"virtual GPUs know the devices cpu and cuda:0 to cuda:{len(self.gpus) - 1}, not {str(device)!r}"
                )
            index = self.local.current if device.index is None else device.index
        if not 0 <= index < len(self.look()):
            raise invalid_ordinal() if self.gpus else no_gpus()
        if not self.initialized or self.forked or self.local.seen is not self:
            self.use()
        return self.gpus[index]

    def use(self) -> None:
        """Somebody uses a GPU. Raises PyTorch's error in a process that was forked from one that had."""
        if self.forked:
            raise forked()
        if self.local.seen is not self and not self.closed:
            self.enter()
        if not self.initialized:
            self.initialize()
            if self.on_first_use is not None:
                self.on_first_use()

    def initialize(self) -> None:
        """CUDA begins: what it reads once is read."""
        self.initialized = True
        self.clock.blocking = launch_blocking()

    def own(self, gpu: GPU) -> GPU:
        """That GPU, if it is still one of these. Raises RuntimeError for one that a later call of gpus() replaced."""
        if self.forked:
            raise forked()
        if gpu.machine is not self:
            raise RuntimeError(
                f"this tensor lives on {gpu.device} of virtual GPUs that a later call of gpus() replaced; make it again"
            )
        return gpu

    def charge_copy(self, source: GPU | None, target: GPU | None, nbytes: int, wait: bool) -> None:
        """The time of a copy between two places. Only a copy from or to pinned memory leaves the host free."""
        if self.local.by_nccl:
            return
        if source is not None and target is not None:
            self.clock.between(source.index, target.index, source.spec.peer.seconds(nbytes))
        elif target is not None:
            seconds = target.spec.host.seconds(nbytes)
            self.clock.host_copy(target.index, seconds, wait, "copy from the host", "in")
        elif source is not None:
            seconds = source.spec.host.seconds(nbytes)
            self.clock.host_copy(source.index, seconds, wait, "copy to the host", "out")

    def place(self, tensor: torch.Tensor, gpu: GPU | None) -> torch.Tensor:
        """Let this tensor's storage live on `gpu`. Raises torch.OutOfMemoryError where there is no room."""
        self.place_storage(storage_of(tensor), gpu)
        return tensor

    def place_storage(self, storage, gpu: GPU | None):
        """As `place`; returns the storage. None for `gpu`: the CPU; the bytes that it had on a GPU are given back."""
        setattr(storage, HOME, None if gpu is None else Home(gpu, storage.nbytes()))
        return storage


class _PerThread(threading.local):
    current = 0  # torch.cuda.current_device()
    bypass = False  # see untracked()
    by_nccl = False  # see by_nccl()
    made_on: GPU | None = None  # see made_on()
    counts = False  # see counted_by_cpp()
    last: GPU | None = None  # on which the latest operation ran
    seen = None  # the machine whose dispatch mode this thread has
