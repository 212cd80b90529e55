"""Memory that kernels take while they run: of reductions, cuDNN's convolutions, cuBLAS, and others. It shows in peaks."""

import functools
import itertools
import os
import threading
import warnings
from collections import defaultdict
from functools import partial

import torch

from virtualgpu import _compat, environment
from virtualgpu.engine.half_precision import HALVES
from virtualgpu.timing import reductions
from virtualgpu.timing.memory_bound import COPIED, copied_first, few_indices
from virtualgpu.timing.reductions import BY_TYPE, MANY, NAMES, NORMS, SUMS

# -- What CUDA's reductions (sum, mean, max, var, any and their kind) take of the GPU's memory while they run.
#
# Where each output has many inputs and there are few outputs, several blocks of threads share an output: each leaves its part in a buffer,
# and a counter (semaphore) for each tells who is the last and adds up the parts. The gradient of a bias, a sum over the rows of [2048, 4096]
# numbers, takes 64 MiB so. timing/reductions.py says how the work is split; its bytes are those of an H100, PyTorch 2.11, measured 2026-11-26.

PAIR = 16  # bytes of a value and its index, or of mean, squares and count (WelfordData)


def held(name: str, args, kwargs, out, gpu) -> list[int]:
    """Bytes of each block that the reduction called `name` takes and gives back."""
    source = args[0]
    result = out[0] if isinstance(out, tuple) else out
    if len(args) > 1 and isinstance(args[1], torch.Tensor):  # max of two tensors
        return []
    if not source.numel() or not result.numel() or source.layout is not torch.strided:
        return []
    copies = name in SUMS and result.dtype is not source.dtype
    if source.numel() < MANY and not copies:
        return []
    dims = reductions.dims_of(args[2:] if name in NORMS else args[1:], source.dim())
    copy, dtype = [], source.dtype
    if copies and not (dtype in HALVES and result.dtype is torch.float32):
        dtype = result.dtype
        copy = [source.numel() * dtype.itemsize]
    return copy + split(source, dims, _entry(name, dtype, isinstance(out, tuple)), gpu.spec)


def over_all(tensor: torch.Tensor, spec) -> list[int]:
    """The same of a sum or mean of all numbers."""
    return split(tensor, range(tensor.dim()), max(4, tensor.itemsize), spec)


def split(source: torch.Tensor, dims, entry: int, spec) -> list[int]:
    """[bytes of the buffer, of its counters] for a reduction of `source` over `dims`, whose parts have `entry` bytes; [] without any."""
    if source.numel() < MANY:
        return []
    plan = reductions.plan(source, dims, spec)
    if plan.blocks <= 1:
        return []
    return [entry * plan.outputs * plan.blocks * (1 if plan.along else plan.across * plan.vector), 4 * plan.grid]


def _entry(name: str, dtype: torch.dtype, several: bool) -> int:
    """Bytes of one part of a result."""
    if name == "aminmax":
        return 2 * dtype.itemsize
    if name in ("argmax", "argmin") or (name in ("max", "min") and several):
        return PAIR
    if name in ("var", "std", "var_mean", "std_mean"):
        return 2 * PAIR if dtype is torch.float64 else PAIR
    return dtype.itemsize if name in BY_TYPE else max(4, dtype.itemsize)


# -- What cuDNN's convolutions take of the GPU's memory while they run.
#
# Tensor cores read pictures with their channels last. Where these lie first, cuDNN lays input, weights and result out anew in a workspace,
# and the gradients' likewise; the gradient of the weights is added up from several parts. No source of NVIDIA's says so: measured on an
# H100, cuDNN 9.19, PyTorch 2.11, 2026-11-26, in float32 (TF32), float16 and bfloat16. Kernels of one place, and those that do not overlap,
# took nothing but the parts of the weights' gradient; one filter for each channel nothing at all. What channels_last takes, up to a third of
# that in a backward pass, is not modelled.


AMPERE = (8, 0)
# Of the weights' gradient: 16 parts for 256 x 64 filters of one place, 15 for 64 x 64 of 3 x 3, which take 1.9 to 2.1 MiB
PARTS, ALL_PARTS = 16, 2 << 20
PLACES = 1024  # of all pictures, at least, for each part of filters of one place; our own figure
EACH = 16


def forward(args, kwargs, out, gpu) -> list[int]:
    """convolution: one block, of input, weights and result; float32 writes the result of one or two dimensions where it belongs."""
    input, weight, transposed = args[0], args[1], args[6]
    if not _on_tensor_cores(input, args[8], gpu) or not _laid_out_anew(input, weight, args[3]):
        return []
    direct = (
        input.dtype is torch.float32 and input.dim() < 5 and not transposed and args[8] == 1 and input.shape[1] % 4 == 0
    )
    return [input.nbytes + weight.nbytes + (0 if direct else out.nbytes) + EACH]


def backward(args, kwargs, out, gpu) -> list[int]:
    """convolution_backward: the larger of two, for the gradients of input and weights, which come one after the other."""
    gradient, input, weight, wanted = args[0], args[1], args[2], args[10]
    if not _on_tensor_cores(input, args[9], gpu):
        return []
    if not _laid_out_anew(input, weight, args[4]):
        number = min(PARTS, gradient.numel() // gradient.shape[1] // PLACES)
        parts = min(number * weight.numel() * 4, ALL_PARTS)
        return [parts] if wanted[1] and number > 1 and weight.shape[2:].numel() == 1 else []
    pictures = input.nbytes + gradient.nbytes
    sizes = [pictures + weight.nbytes] * wanted[0] + [pictures + ALL_PARTS] * wanted[1]
    return [max(sizes)] if sizes else []


def _on_tensor_cores(input, groups: int, gpu) -> bool:
    if gpu.spec.capability < AMPERE or not torch.backends.cudnn.enabled or not input.numel():
        return False
    if input.dtype not in HALVES and not (input.dtype is torch.float32 and _compat.in_tf32("conv")):
        return False
    return groups == 1 or groups != input.shape[1]  # otherwise one filter for each channel


def _laid_out_anew(input, weight, strides) -> bool:
    kernel = weight.shape[2:]
    if all(size <= stride for size, stride in zip(kernel, list(strides) * (len(kernel) // len(strides)), strict=True)):
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    return last is None or not any(
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() for tensor in (input, weight)
    )


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


# -- Memory that CUDA's kernels take for themselves and give back with the end of the call: it shows in peaks, and in reserved memory.
#
# Each rule says how many bytes each such block has, in the order in which they are asked for. Measured on an H100, PyTorch 2.11, 2026-11-26;
# the sources are files of aten/src/ATen/native/cuda.


MEAN_OR_SUM = (1, 2)  # at::Reduction


def loss(args, kwargs, out, gpu) -> list[int]:
    """A loss that is added up afterwards: one of each entry first (BinaryMiscOpsKernels.cu, Loss.cu)."""
    reduction = next((value for value in args[2:] if type(value) is int), kwargs.get("reduction", 1))
    if reduction not in MEAN_OR_SUM:
        return []
    entries = args[0] if args[0].numel() >= args[1].numel() else args[1]
    return [entries.nbytes, *over_all(entries, gpu.spec)]


def loss_within(args, kwargs, out, gpu) -> list[int]:
    """A loss whose entries lie in the memory of its result, which becomes small at last (Loss.cpp)."""
    reduction = next((value for value in args[2:] if type(value) is int), kwargs.get("reduction", 1))
    return [out.itemsize, *over_all(args[0], gpu.spec)] if reduction in MEAN_OR_SUM else []


def soft_margin_backward(args, kwargs, out, gpu) -> list[int]:
    """-target, and its product with the input (soft_margin_loss_backward_out in Loss.cpp)."""
    return [out.nbytes, out.nbytes]


def count_nonzero(args, kwargs, out, gpu) -> list[int]:
    """What is not zero, and that as int64, which is added up (count_nonzero_cuda in TensorCompare.cpp)."""
    whole = torch.empty_like(args[0], dtype=torch.int64, device="meta")
    return [args[0].numel(), whole.nbytes, *held("sum", (whole, *args[1:]), {}, out, gpu)]


def with_logits(args, kwargs, out, gpu) -> list[int]:
    """binary_cross_entropy_with_logits is made of plain operations: the loss of each entry, and another block of its size (Loss.cpp)."""
    entries, reduction = args[0], args[4] if len(args) > 4 else kwargs.get("reduction", 1)
    if reduction not in MEAN_OR_SUM:
        return [entries.nbytes]
    return [entries.nbytes, entries.nbytes, *over_all(entries, gpu.spec)]


def copies(args, kwargs, out, gpu, name: str) -> list[int]:
    """What does not lie close is copied first (SoftMax.cu, layer_norm_kernel.cu)."""
    return [tensor.nbytes for tensor in copied_first(COPIED[name], args)]


def softmax_backward(args, kwargs, out, gpu) -> list[int]:
    """The gradient times the output (softmax_backward_cuda_out in SoftMax.cu); log_softmax needs none."""
    return [max(args[0].nbytes, args[1].nbytes)]


def ctc_loss_backward(args, kwargs, out, gpu) -> list[int]:
    """What the forward pass has kept of sequences from their beginning, from their end (log_beta in LossCTC.cu)."""
    return [args[6].nbytes]


def roll(args, kwargs, out, gpu) -> list[int]:
    """Over several dimensions it goes one by one (TensorTransformations.cu)."""
    return [args[0].nbytes] * (len(args[2]) > 1 if len(args) > 2 else 0)


def embedding_backward(args, kwargs, out, gpu) -> list[int]:
    """Many indices are sorted, and each row's gradients added up by parts, ten at a time, in single precision (EmbeddingBackwardKernel.cu)."""
    indices, by_frequency = args[1], args[4]
    if few_indices(args):
        return []
    return _sorted_rows(indices, 2 + by_frequency, out)


def embedding_bag_backward(args, kwargs, out, gpu) -> list[int]:
    """The same with few indices, too; those of the places before sorting are a tensor of their own (EmbeddingBag.cu)."""
    if out.layout is not torch.strided:  # sparse
        return []
    by_frequency = args[7]
    return _sorted_rows(args[1], 3 + by_frequency, out)


def _sorted_rows(indices, copies: int, out) -> list[int]:
    """So many copies of the indices, where each row begins, and sums of ten gradients each."""
    count, size = indices.numel(), indices.itemsize
    if not out.numel():
        return []
    segments = min(count, out.shape[0])
    parts = -(-count // 10) + segments
    of_segments = [segments * size, 8, segments * size, segments * size, 8]
    return [*[count * size] * copies, *of_segments, parts * size, parts * out.shape[1] * max(4, out.itemsize)]


def index_put(args, kwargs, out, gpu) -> list[int]:
    """What is added to the same place is found by sorting the places (index_put_with_sort_kernel in Indexing.cu)."""
    indices = [index for index in args[1] if index is not None]
    if len(args) < 4 or not args[3] or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    count = torch.broadcast_shapes(*[index.shape for index in indices]).numel()
    if count <= TILE:
        return [count * 8] * 5
    return [count * 8] * 4 + [_radix_sort(count, 8, 8)]


def sort(args, kwargs, out, gpu) -> list[int]:
    """Rows of up to 4,096 numbers: their indices. One long row: these, and what CUB's radix sort takes (Sort.cpp, SortStable.cu)."""
    tensor = args[0]
    if not tensor.dim() or not tensor.numel():
        return []
    dim = kwargs.get("dim", next((value for value in args[1:] if type(value) is int), -1))
    length = tensor.shape[dim]
    if length <= 4096:
        return [length * 8]
    return [length * 8, _radix_sort(length, tensor.itemsize, 8)] if length == tensor.numel() else []


TILE = 5376  # numbers that a block of CUB's radix sort takes, of pairs of 4 and 8 bytes


def _radix_sort(count: int, key: int, value: int) -> int:
    """Bytes for so many pairs: a second copy of them, and, for each byte of the key, how many have it in each block."""
    return count * (key + value) + 1024 * -(-count // TILE) + 2048 * key + 511


RULES = {
    "convolution": forward,
    "convolution_backward": backward,
    "embedding_dense_backward": embedding_backward,
    "_embedding_bag_backward": embedding_bag_backward,
    "index_put": index_put,
    "index_put_": index_put,
    "_index_put_impl_": index_put,
    "sort": sort,
    "argsort": sort,
    **{name: partial(held, name) for name in NAMES},
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), loss),
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), loss_within),
    "soft_margin_loss_backward": soft_margin_backward,
    "count_nonzero": count_nonzero,
    "roll": roll,
    "binary_cross_entropy_with_logits": with_logits,
    **{name: partial(copies, name=name) for name in COPIED},
    "_softmax_backward_data": softmax_backward,
    "_ctc_loss_backward": ctc_loss_backward,
}
