"""One virtual GPU: its memory, which every thread may ask for, what cuBLAS works in, and its place in the clock."""

import contextlib
import functools
import itertools
import os
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Protocol
from uuid import UUID

import torch

from virtualgpu import _compat, environment
from virtualgpu.errors import CUDNN_HANDLE, cudnn_not_initialized
from virtualgpu.hardware.machine import DATASHEET, MachineSettings
from virtualgpu.hardware.specs import Spec
from virtualgpu.hardware.units import MIB
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.ledger import PLAYED_PID, Ledger
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.kernels import Kernels

# What a process's CUDA context takes of a GPU before its first tensor: 102 MiB on Colab's T4 (nvidia-smi, CUDA 12).
CONTEXT = 102 * MIB
# From capability 9.0 on, with the kernels that the first tensor loads (92 MiB of it): an H100, driver 580, CUDA 13, PyTorch 2.11,
# 2026-11-26. Not counted: 66 MiB of cuBLAS's kernels at the first product there, 492 MiB of NCCL's at the first collective.
CONTEXT_OF_HOPPER = 610 * MIB


class Owner(Protocol):
    """What a GPU asks of the machine that it is part of."""

    clock: Clock
    settings: MachineSettings


class GPU:
    """One virtual GPU: its spec, its memory, its place in the clock.

    index: CUDA's number of it. physical: the machine's, which CUDA_VISIBLE_DEVICES may have changed.
    """

    def __init__(self, index: int, spec: Spec, machine: Owner, physical: int | None = None):
        self.index, self.spec, self.machine = index, spec, machine
        self.physical = index if physical is None else physical
        self.device = torch.device("cuda", index)
        self.kernels = Kernels(spec, peak=machine.settings.clock == DATASHEET)
        # a GPU made small for a lesson keeps its memory for the lesson
        contexts = (CONTEXT_OF_HOPPER, CONTEXT) if spec.capability >= (9, 0) else (CONTEXT,)
        context = next((context for context in contexts if spec.memory > 8 * context), 0)
        self.lock = threading.RLock()
        self.memory = CachingAllocator(spec.memory, index, context, timeline=_Timeline(machine.clock, index))
        self.uuid = UUID(environment.uuid(self.physical).removeprefix("GPU-"))
        self.cudnn = False  # has its handle
        self.workspaces: dict = {}  # of cuBLAS, that handles keep
        self.makes_workspace = False  # is what asks for memory now cuBLAS?
        self._freed: deque = deque()

    def share(self, ledger: Ledger) -> None:
        """From now on its memory is shared with the other processes that keep this ledger."""
        with self.lock:  # another thread's malloc asks both, or none
            note = functools.partial(self.note, ledger)
            self.memory.share(functools.partial(ledger.processes, self.physical), ledger.lock, note)

    def note(self, ledger: Ledger, memory: CachingAllocator) -> None:
        """Write down what this process holds of it."""
        held = memory.reserved + memory.context
        ledger.note(self.physical, held, memory.peak_allocated, memory.peak_reserved, memory.occupied)

    @contextlib.contextmanager
    def leaving(self, nbytes: int, container: bool = False) -> Iterator[None]:
        """In this block another process holds all that is free now but so many bytes. container: this one's pid is the host's."""
        before = self.memory.host_pid
        with self.lock:
            if container:
                self.memory.be_in_container(PLAYED_PID + 1)
            taken = max(0, self.settled().free_on_gpu - nbytes)
            self.memory.occupy(taken)
        try:
            yield
        finally:
            with self.lock:
                self.memory.be_in_container(before)
                self.memory.occupy(-taken)

    def malloc(self, nbytes: int):
        """A block of memory on the current stream. Raises torch.OutOfMemoryError as PyTorch would."""
        clock = self.machine.clock
        stream = clock.current(self.index).id if clock.multi else 0  # as `stream`, written out for speed
        with self.lock:
            while self._freed:  # as `_collect`, which is a call more for every result
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
        clock = self.machine.clock
        stream = clock.current(self.index).id if clock.multi else 0  # as `stream`
        with self.lock:
            if self._freed:
                self._collect()
            self.makes_workspace = True
            try:
                self.memory.free(self.memory.malloc(nbytes, stream))
            finally:
                self.makes_workspace = False

    def lend(self, sizes: list[int], needed: bool = True) -> None:
        """Blocks of these bytes, all at once, for the length of one call. Where there is no room, raises torch.OutOfMemoryError, or, if
        they are not `needed`, goes without: cuDNN has kernels that take less."""
        blocks = []
        try:
            for nbytes in filter(None, sizes):  # 0 of the gradient of x[nothing]
                blocks.append(self.malloc(nbytes))  # those before are given back where one fails
        except torch.OutOfMemoryError:
            if needed:
                raise
        finally:
            for block in blocks:
                self.free(block)

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

    def settled(self) -> CachingAllocator:
        """The allocator with every free carried out, for whoever reads figures."""
        with self.lock:
            self._collect()
        return self.memory

    @contextlib.contextmanager
    def only(self) -> Iterator[CachingAllocator]:
        """The same, which nobody else changes in this block."""
        with self.lock:
            yield self.settled()

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


# -- The memory that cuBLAS works in, as PyTorch's C++ takes it from the caching allocator.
#
# A product asks for a workspace once its result has memory: 8.125 MiB, 32 MiB on Hopper and Blackwell; one with a bias goes to
# cuBLASLt, which asks for 1 MiB. From PyTorch 2.15 on it is given back with the end of the call, so that it shows in peaks and in
# reserved memory alone. Before, and with TORCH_CUBLAS_WORKSPACE_CACHE=1, each handle keeps one for each stream. A thread has a handle
# for each GPU, and so has autograd's thread; the handle of a thread that has ended goes to the next one.
#
# Sources: aten/src/ATen/cuda/CublasHandlePool.cpp (sizes, caches), detail/DeviceThreadHandles.h (handles), CUDABlas.cpp and
# native/cuda/Blas.cpp (who asks for which), and the wheels of 2.11 to 2.15, disassembled.


KIB = 1024
SMALL, LARGE = (4096 * 2 + 16 * 8) * KIB, 4096 * 8 * KIB
# What each operation asks for: a product may go to cuBLASLt where that is preferred, or where it adds a bias to its result
PRODUCT, BIASED, SOLVER, LT, HANDLE = "product", "biased", "solver", "lt", "handle"
USERS = {
    **dict.fromkeys(("mm", "bmm", "baddbmm", "addbmm"), PRODUCT),
    **dict.fromkeys(("addmm", "_addmm_activation"), BIASED),
    **dict.fromkeys(("mv", "addmv", "dot", "vdot", "triangular_solve", "linalg_solve_triangular"), SOLVER),
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), LT),
    "_int_mm": HANDLE,
}
WITH_BIAS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
STRIDED = torch.strided
AUTOGRAD = -1  # the handle of autograd's thread; those of Python's threads count from 0


class Workspaces:
    """Those of one machine's GPUs; each GPU has its own in `workspaces`: {(handle, stream, of cuBLASLt): (bytes, block)}."""

    def __init__(self):
        self._size: int | None = None
        self._lt_size: int | None = None
        self._threads = threading.local()
        self._idle: dict[int, list[int]] = defaultdict(list)  # handles of threads that have ended, by GPU
        self._new = itertools.count()
        self._warned = False
        self.prefer(_compat.preferred_blas())

    def prefer(self, library) -> None:
        """torch.backends.cuda.preferred_blas_library: one of _BlasBackend."""
        self.prefers_lt = library == _compat.CUBLASLT

    # -- settings: variables are read where they are first needed

    @functools.cached_property
    def keeps(self) -> bool:
        """Does each handle keep its workspaces? Otherwise each product gives its own back."""
        return _compat.KEEPS_WORKSPACES or environment.flag("TORCH_CUBLAS_WORKSPACE_CACHE") is True

    @functools.cached_property
    def shared(self) -> bool:
        """Does cuBLASLt work in the workspace that a handle of cuBLAS keeps?"""
        shares = environment.flag("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
        return self.keeps and (shares is True if _compat.LT_HAS_ITS_OWN else shares is not False)

    @functools.cached_property
    def adds_bias(self) -> bool:
        """May cuBLASLt add the bias of a product?"""
        return os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1"

    def size(self, gpu) -> int:
        """Bytes of cuBLAS's: what was set, CUBLAS_WORKSPACE_CONFIG, or PyTorch's own for the card that asks first."""
        if self._size is None:
            large = gpu.spec.capability[0] in _compat.LARGE_WORKSPACES
            self._size = environment.cublas_workspace(LARGE if large else SMALL)
        return self._size

    def lt_size(self, gpu) -> int:
        """Bytes of cuBLASLt's: what was set, CUBLASLT_WORKSPACE_SIZE, or 1 MiB; no more than cuBLAS's where both share one."""
        if self._lt_size is None:
            self._lt_size = environment.cublaslt_workspace()
        if not self.shared or self._lt_size <= (most := self.size(gpu)):
            return self._lt_size
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Requested unified CUBLASLT workspace size of {self._lt_size} bytes exceeds CUBLAS workspace size of {most} bytes. "
                "Please increase CUBLAS workspace size via CUBLAS_WORKSPACE_CONFIG or decrease requested "
                "CUBLASLT_WORKSPACE_SIZE. Otherwise CUBLASLT workspace size will be limited to the CUBLAS workspace size.",
                stacklevel=2,
            )
        return most

    def set_size(self, nbytes: int | None) -> None:
        """torch.backends.cuda.cublas_workspace_size; None: as the variable says."""
        self._size = nbytes

    def set_lt_size(self, nbytes: int | None) -> None:
        """torch.backends.cuda.cublaslt_workspace_size; None: as the variable says."""
        self._lt_size = nbytes

    # -- what operations ask for

    def use(self, user: str, args, kwargs, out, gpu) -> None:
        """One operation of USERS, whose result has its memory. Raises torch.OutOfMemoryError where there is no room.

        A GPU made very small for a lesson has no workspaces, as it has no context: it keeps its memory for the lesson.
        """
        if not gpu.memory.context:
            return
        lt = False
        if user is PRODUCT or user is BIASED:
            lhs, rhs = args[:2] if user is PRODUCT else args[1:3]
            if lhs.layout is not STRIDED or rhs.layout is not STRIDED or not out.numel():
                return  # cuSPARSE's memory is not known
            lt = self.prefers_lt or (user is BIASED and self.adds_bias and _fits_lt(args, kwargs, out))
        elif user is not SOLVER:
            if user is HANDLE and not (self.keeps and _compat.LT_HAS_ITS_OWN):
                return
            lt = user is LT
        if not self.keeps:
            gpu.lend_workspace(self.lt_size(gpu) if lt else self._size or self.size(gpu))
            return
        if not lt or self.shared or _compat.LT_HAS_ITS_OWN:
            self.keep(gpu)
        if lt and not self.shared:
            self.keep(gpu, lt=True)

    def keep(self, gpu, lt: bool = False) -> None:
        """The workspace of this thread's handle and the current stream, made or made larger where it has to be."""
        size = self.lt_size(gpu) if lt else self.size(gpu)
        key = self._handle(gpu.index), gpu.stream, lt
        held = gpu.workspaces.get(key)
        if held is None or held[0] < size:
            with gpu.lock:  # autograd's handle is of several threads of ours
                held = gpu.workspaces.get(key)
                if held is None or held[0] < size:
                    gpu.workspaces[key] = size, gpu.malloc_workspace(size)
                    if held is not None:
                        _free(gpu, held[1])

    def clear(self, gpus) -> None:
        """torch._C._cuda_clearCublasWorkspaces: those that are kept are given back to the allocator."""
        for gpu in gpus:
            with gpu.lock:
                while gpu.workspaces:
                    _free(gpu, gpu.workspaces.popitem()[1][1])

    def _handle(self, index: int) -> int:
        if _compat.graph_task() != -1:
            return AUTOGRAD
        handles = getattr(self._threads, "handles", None)
        if handles is None:
            handles = self._threads.handles = _Handles(self._idle)
        if index not in handles:
            try:
                handles[index] = self._idle[index].pop()
            except IndexError:
                handles[index] = next(self._new)
        return handles[index]


class _Handles(dict):
    """One thread's, by GPU. They are free for others when it ends."""

    def __init__(self, idle: dict[int, list[int]]):
        super().__init__()
        self.idle = idle

    def __del__(self):
        for index, handle in self.items():
            self.idle[index].append(handle)


def _free(gpu, block) -> None:
    if block is not None:  # a workspace of no bytes
        gpu.free(block)


def _fits_lt(args, kwargs, out) -> bool:
    """Does addmm add its bias in cuBLASLt? (isInputCompliesAddmmCudaLt in Blas.cpp.)"""
    bias, lhs = args[0], args[1]
    (rows, columns), inner = out.shape, lhs.shape[1]
    return (
        bias.numel() == columns > 1
        and rows > 1
        and inner > 1
        and (not kwargs or kwargs.get("beta", 1) == 1)
        and lhs.dtype in WITH_BIAS
        and bias.shape[-1] == columns
        and bias.is_contiguous()
        and out.is_contiguous()
    )
