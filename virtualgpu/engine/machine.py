"""The virtual GPUs themselves: who owns which storage, the memory of each, and their clock.

A tensor's place is that of its storage. A storage on a GPU carries a `Home` as its Python attribute; it dies with the storage,
wherever that was kept (a variable, the autograd graph, an optimizer), and gives its block back. A storage without one is the CPU's.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator

import torch

from virtualgpu.errors import CUDNN_HANDLE, cudnn_not_initialized, invalid_ordinal
from virtualgpu.hardware.specs import MIB, Spec
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.simulation.clock import Clock

# What a process's CUDA context takes of a GPU before its first tensor: 102 MiB on Colab's T4 (nvidia-smi, CUDA 12).
CONTEXT = 102 * MIB
HOME = "_virtual_home"  # the attribute of a storage


class GPU:
    """One virtual GPU: its spec, its memory, its place in the clock."""

    def __init__(self, index: int, spec: Spec, machine: "Machine"):
        self.index, self.spec, self.machine = index, spec, machine
        self.device = torch.device("cuda", index)
        # a GPU made very small for a lesson keeps its memory for the lesson
        context = CONTEXT if spec.memory > 8 * CONTEXT else 0
        self.memory = CachingAllocator(spec.memory, index, context)
        self.cudnn = False  # has its handle
        self._freed: deque = deque()
        self._lock = threading.Lock()

    def malloc(self, nbytes: int):
        """A block of memory. Raises torch.OutOfMemoryError as PyTorch would."""
        with self._lock:
            self._collect()
            return self.memory.malloc(nbytes)

    def free(self, block) -> None:
        """Only noted here: a destructor may run in the middle of malloc."""
        self._freed.append(block)

    def settled(self) -> CachingAllocator:
        """The allocator with every free carried out, for whoever reads figures."""
        with self._lock:
            self._collect()
        return self.memory

    def use_cudnn(self) -> None:
        """The first convolution makes cuDNN's handle, which cannot use what PyTorch keeps reserved. Raises RuntimeError without room."""
        if self.settled().free_on_gpu < CUDNN_HANDLE:
            raise cudnn_not_initialized()
        self.cudnn = True

    def _collect(self) -> None:
        while self._freed:
            self.memory.free(self._freed.popleft())

    def __repr__(self) -> str:
        return f"cuda:{self.index} ({self.spec.name}, virtual)"


class Home:
    """Where a storage lives. Gives its memory back when it goes."""

    __slots__ = ("block", "gpu", "nbytes")

    def __init__(self, gpu: GPU, nbytes: int):
        self.gpu, self.nbytes = gpu, nbytes
        self.block = None  # so that a failing malloc leaves nothing to free
        self.block = gpu.malloc(nbytes)

    def __del__(self):
        if self.block is not None:
            self.gpu.free(self.block)


class Machine:
    """All the virtual GPUs, the clock they share, and which one is current. Threads have their own current device."""

    def __init__(self, specs: list[Spec]):
        self.clock = Clock(
            len(specs), blocking=os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        )  # read once, as CUDA does
        self.gpus = [GPU(index, spec, self) for index, spec in enumerate(specs)]
        self.dry = False
        self.explained = False  # that a value read in a dry run is nan
        self.asked: dict = {}  # when somebody last asked for a GPU's load, and its busy time then
        self.local = _PerThread()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operations in here are the bookkeeper's own: no place, no memory, no time, and devices are what they really are."""
        before, self.local.bypass = self.local.bypass, True
        try:
            yield
        finally:
            self.local.bypass = before

    @property
    def base(self) -> str:
        """The device that tensors are really on: "cpu" with numbers, "meta" in a dry run."""
        return "meta" if self.dry else "cpu"

    def gpu(self, device) -> GPU | None:
        """The GPU that a device, a name ("cuda:1"), an index or None (the current one) stands for; None for the CPU.

        Raises the error of PyTorch for a GPU that is not there.
        """
        if device is None or (isinstance(device, int) and not isinstance(device, bool)):
            index = self.local.current if device is None else device
        else:
            device = torch.device(device)
            if device.type == "cpu":
                return None
            if device.type != "cuda":
                raise NotImplementedError(
                    f"virtual GPUs know the devices cpu and cuda:0 to cuda:{len(self.gpus) - 1}, not {str(device)!r}"
                )
            index = self.local.current if device.index is None else device.index
        if not 0 <= index < len(self.gpus):
            raise invalid_ordinal()
        return self.gpus[index]

    def own(self, gpu: GPU) -> GPU:
        """That GPU, if it is still one of these. Raises RuntimeError for one that a later call of gpus() replaced."""
        if gpu.machine is not self:
            raise RuntimeError(
                f"this tensor lives on {gpu.device} of virtual GPUs that a later call of gpus() replaced; make it again"
            )
        return gpu

    def travel(self, source: GPU | None, target: GPU | None, tensor: torch.Tensor, wait: bool) -> None:
        """The time of a copy between two places. Only a copy from or to pinned memory leaves the host free."""
        nbytes = tensor.nbytes
        if source is not None and target is not None:
            self.clock.between(source.index, target.index, source.spec.peer.seconds(nbytes))
        elif target is not None:
            self.clock.host_copy(target.index, target.spec.host.seconds(nbytes), wait, "copy from the host")
        elif source is not None:
            self.clock.host_copy(source.index, source.spec.host.seconds(nbytes), wait, "copy to the host")

    def place(self, tensor: torch.Tensor, gpu: GPU | None) -> torch.Tensor:
        """Let this tensor's storage live on `gpu`. Raises torch.OutOfMemoryError where there is no room."""
        self.place_storage(storage_of(tensor), gpu)
        return tensor

    def place_storage(self, storage, gpu: GPU | None):
        setattr(storage, HOME, None if gpu is None else Home(gpu, storage.nbytes()))
        return storage


class _PerThread(threading.local):
    current = 0  # torch.cuda.current_device()
    bypass = False  # see aside()


def storage_of(tensor: torch.Tensor):
    """A tensor's storage, through the wrappers of torch.func; None where there is none (sparse tensors)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return storage_of(torch._C._functorch.get_unwrapped(tensor))
        return None


def gpu_of(tensor: torch.Tensor) -> GPU | None:
    """Where a tensor lives; None: on the CPU."""
    home = getattr(storage_of(tensor), HOME, None)
    return None if home is None else home.gpu
