"""All the virtual GPUs: the clock they share, which one is current, and what each thread is doing with them."""

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch

from virtualgpu.engine.allocation import ALLOCATION, Allocation, gpu_of, storage_of
from virtualgpu.engine.gpu import CONTEXT, GPU
from virtualgpu.engine.in_thread import Anywhere, here
from virtualgpu.engine.workspaces import Workspaces
from virtualgpu.environment import launch_blocking
from virtualgpu.errors import forked, invalid_ordinal, no_gpus
from virtualgpu.hardware.hosts import HOSTS, ClockSettings
from virtualgpu.hardware.networks import Network
from virtualgpu.hardware.specs import Spec
from virtualgpu.memory.ledger import Ledger
from virtualgpu.timing.clock import Clock

__all__ = ["ALLOCATION", "CONTEXT", "GPU", "Allocation", "Machine", "gpu_of", "storage_of"]


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
        self.single_rank = None  # the rank that this process plays alone: distributed.rank_config.RankConfig
        self.gpus_per_node: int | None = None
        self.network: Network | None = None
        self.communicators = None  # of process groups: virtualgpu.distributed puts them here
        self._equip(list(range(len(specs))) if visible is None else visible)
        self.always_dry = False
        self.initialized = self.forked = self.closed = False
        self.enter = self.leave = None  # the thread that calls it sees the GPUs, or no longer
        self.on_first_use = None
        self.warned_about_nan = False
        self.workspaces = Workspaces()
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
        setattr(storage, ALLOCATION, None if gpu is None else Allocation(gpu, storage.nbytes()))
        return storage


class _PerThread(threading.local):
    current = 0  # torch.cuda.current_device()
    bypass = False  # see untracked()
    by_nccl = False  # see by_nccl()
    made_on: GPU | None = None  # see made_on()
    counts = False  # see counted_by_cpp()
    last: GPU | None = None  # on which the latest operation ran
    seen = None  # the machine whose dispatch mode this thread has
