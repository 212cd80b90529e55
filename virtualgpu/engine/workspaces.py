"""The memory that cuBLAS works in, as PyTorch's C++ takes it from the caching allocator.

A product asks for a workspace once its result has memory: 8.125 MiB, 32 MiB on Hopper and Blackwell; one with a bias goes to
cuBLASLt, which asks for 1 MiB. From PyTorch 2.15 on it is given back with the end of the call, so that it shows in peaks and in
reserved memory alone. Before, and with TORCH_CUBLAS_WORKSPACE_CACHE=1, each handle keeps one for each stream. A thread has a handle
for each GPU, and so has autograd's thread; the handle of a thread that has ended goes to the next one.

Sources: aten/src/ATen/cuda/CublasHandlePool.cpp (sizes, caches), detail/DeviceThreadHandles.h (handles), CUDABlas.cpp and
native/cuda/Blas.cpp (who asks for which), and the wheels of 2.11 to 2.15, disassembled.
"""

import functools
import itertools
import os
import threading
import warnings
from collections import defaultdict

import torch

from virtualgpu import _compat, environment

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
            left, right = args[:2] if user is PRODUCT else args[1:3]
            if left.layout is not STRIDED or right.layout is not STRIDED or not out.numel():
                return  # cuSPARSE's memory is not known
            lt = self.prefers_lt or (user is BIASED and self.adds_bias and _fits_lt(args, kwargs, out))
        elif user is not SOLVER:
            if user is HANDLE and not (self.keeps and _compat.LT_HAS_ITS_OWN):
                return
            lt = user is LT
        if not self.keeps:
            gpu.lend_workspace(self.lt_size(gpu) if lt else self.size(gpu))
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
    bias, left = args[0], args[1]
    (rows, columns), inner = out.shape, left.shape[1]
    return (
        bias.numel() == columns > 1
        and rows > 1
        and inner > 1
        and (not kwargs or kwargs.get("beta", 1) == 1)
        and left.dtype in WITH_BIAS
        and bias.shape[-1] == columns
        and bias.is_contiguous()
        and out.is_contiguous()
    )
