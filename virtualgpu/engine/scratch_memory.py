"""Memory that kernels take while they run: of reductions, cuDNN's convolutions, and others. It shows in peaks."""

from collections.abc import Callable
from functools import partial

import torch

from virtualgpu import _compat
from virtualgpu.engine.cuda_differences import HALVES
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


# -- Memory that CUDA's kernels take for themselves and give back with the end of the call: it shows in peaks, and in reserved memory.
#
# Each rule says how many bytes each such block has, in the order in which they are asked for. Measured on an H100, PyTorch 2.11, 2026-11-26;
# the sources are files of aten/src/ATen/native/cuda.


NONE = 0  # at::Reduction


def _reduction(args, kwargs) -> int:
    return next((value for value in args[2:] if type(value) is int), kwargs.get("reduction", 1))


def loss(args, kwargs, out, gpu) -> list[int]:
    """A loss that is added up afterwards: one of each entry first (BinaryMiscOpsKernels.cu, Loss.cu)."""
    if _reduction(args, kwargs) == NONE:
        return []
    entries = args[0] if args[0].numel() >= args[1].numel() else args[1]
    return [entries.nbytes, *over_all(entries, gpu.spec)]


def loss_within(args, kwargs, out, gpu) -> list[int]:
    """A loss whose entries lie in the memory of its result, which becomes small at last (Loss.cpp)."""
    return [] if _reduction(args, kwargs) == NONE else [out.itemsize, *over_all(args[0], gpu.spec)]


def with_logits(args, kwargs, out, gpu) -> list[int]:
    """binary_cross_entropy_with_logits is made of plain operations: the loss of each entry, and another block of its size (Loss.cpp)."""
    added_up = _reduction(args, kwargs) != NONE
    return [args[0].nbytes, *([args[0].nbytes, *over_all(args[0], gpu.spec)] if added_up else [])]


def count_nonzero(args, kwargs, out, gpu) -> list[int]:
    """What is not zero, and that as int64, which is added up (count_nonzero_cuda in TensorCompare.cpp)."""
    whole = torch.empty_like(args[0], dtype=torch.int64, device="meta")
    return [args[0].numel(), whole.nbytes, *held("sum", (whole, *args[1:]), {}, out, gpu)]


def copies(name: str, args, kwargs, out, gpu) -> list[int]:
    """What does not lie close is copied first (SoftMax.cu, layer_norm_kernel.cu)."""
    return [tensor.nbytes for tensor in copied_first(COPIED[name], args)]


def embedding_backward(args, kwargs, out, gpu) -> list[int]:
    """Many indices are sorted, and each row's gradients added up by parts, ten at a time, in single precision (EmbeddingBackwardKernel.cu)."""
    return [] if few_indices(args) else _sorted_rows(args[1], 2 + args[4], out)


def embedding_bag_backward(args, kwargs, out, gpu) -> list[int]:
    """The same with few indices, too; those of the places before sorting are a tensor of their own (EmbeddingBag.cu)."""
    return _sorted_rows(args[1], 3 + args[7], out) if out.layout is torch.strided else []


def _sorted_rows(indices, copies: int, out) -> list[int]:
    """So many copies of the indices (one more where gradients are scaled by frequency), where each row begins, and sums of ten gradients each."""
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


# By name: (args, kwargs, the result, its GPU) -> bytes of each block
TEMPORARIES: dict[str, Callable[..., list[int]]] = {
    "convolution": forward,
    "convolution_backward": backward,
    "embedding_dense_backward": embedding_backward,
    "_embedding_bag_backward": embedding_bag_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), index_put),
    **dict.fromkeys(("sort", "argsort"), sort),
    **{name: partial(held, name) for name in NAMES},
    **{name: partial(copies, name) for name in COPIED},
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), loss),
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), loss_within),
    "binary_cross_entropy_with_logits": with_logits,
    "count_nonzero": count_nonzero,
    # -target, and its product with the input (soft_margin_loss_backward_out in Loss.cpp)
    "soft_margin_loss_backward": lambda args, kwargs, out, gpu: [out.nbytes, out.nbytes],
    # over several dimensions it goes one by one (TensorTransformations.cu)
    "roll": lambda args, kwargs, out, gpu: [args[0].nbytes] * (len(args) > 2 and len(args[2]) > 1),
    # the gradient times the output (softmax_backward_cuda_out in SoftMax.cu); log_softmax needs none
    "_softmax_backward_data": lambda args, kwargs, out, gpu: [max(args[0].nbytes, args[1].nbytes)],
    # what the forward pass has kept of sequences from their beginning, from their end (log_beta in LossCTC.cu)
    "_ctc_loss_backward": lambda args, kwargs, out, gpu: [args[6].nbytes],
}
