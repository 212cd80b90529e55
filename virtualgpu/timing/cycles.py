"""Kernels that no memory holds up: cycles of a multiprocessor that they take at least, by their arguments and tensors.

All were measured on an H100 (tests/gpu/h100_kernels.csv, PyTorch 2.11; in 16 bits, where it shows), and are for each number unless said.
"""

from collections.abc import Callable
from math import prod

import torch

# Any batch norm that evaluates; softmax
EVALUATING = 0.62
ROWS = 0.5
# An embedding's for each number of a gradient, beside zeros and sorting
EMBEDDING = 4.7
# A row that is looked up (1.6 thousand million rows of 64 numbers a second), and a number that index_add or scatter_add adds, by an atomic
# operation (1.5 to 1.7, and 2.2 to 3.4)
LOOKED_UP, ADDED, SCATTERED = 163, 1.6, 2.8
# Sorting rows of up to 512 numbers (21 to 23 for 64 and 256), longer ones, and what topk takes for a row and each of its numbers
SORTED, SORTED_LONG, TOP_ROW, TOP = 22, 8.5, 500, 8
ROLLED = 1.15
# A number of so many bytes that cat moves where a part does not lie close (CatArrayBatchedCopy works out each place; tests/gpu/h100_profiled.csv)
JOINED = {2: 1.0, 4: 1.13}
# Activations of 16 bits in the second-level cache, and dropout by the bytes of a number: Philox draws four at once, and a byte of the
# mask is written for each (fused_dropout_kernel_vec; tests/gpu/h100_profiled.csv)
GELU, SILU, DROPPED = 0.36, 0.28, {2: 0.5, 4: 0.8}
# nll_loss runs on one block, which waits for memory in each round: 1,024 threads, 18 to 21 us for 16384 rows on an H100 (PyTorch 2.11). A
# cumulative sum of columns goes through the rows one by one: 0.28 to 0.38 us each (tensor_kernel_scan_outer_dim)
BLOCK, ROUND, STEP = 1024, 1e-6, 0.3e-6


def rows_of(index_at: int) -> Callable:
    """Of an embedding, or what picks whole rows: by the place of the indices among the arguments."""
    return lambda args, tensors: LOOKED_UP * args[index_at].numel()


def rows_of_index(args, tensors) -> float:
    """x[i], where rows are copied by the same kernel (fast_gather_kernel_eligible in IndexKernelUtils.cu): whole ones, of 16 bytes at a time."""
    x, indices = args[0], args[1]
    if len(indices) != 1 or indices[0] is None or not indices[0].dtype.is_signed or x.dim() < 2:
        return 0.0
    return 0.0 if prod(x.shape[1:]) * x.itemsize % 16 else LOOKED_UP * indices[0].numel()


def rolls(args) -> int:
    """roll(x, shifts, dims): once for each dimension (TensorTransformations.cu)."""
    return max(1, len(args[1])) if isinstance(args[1], (list, tuple)) else 1


def joined(args, tensors) -> float:
    """cat(parts, dim), where not all parts lie close in one order (Shape.cu)."""
    parts = [part for part in args[0] if part.numel()]
    for order in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
        if all(_is_close(part, order) for part in parts):
            return 0.0
    return JOINED.get(tensors[-1].itemsize, JOINED[4]) * sum(part.numel() for part in parts)


def _is_close(tensor, order) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous(memory_format=order)


def dropout(args, tensors) -> float:
    """native_dropout(input, p, train)."""
    return DROPPED.get(args[0].itemsize, DROPPED[4]) * args[0].numel()


def added_by(cycles: float, at: int) -> Callable:
    """So many for each number of the argument at that place."""
    return lambda args, tensors: cycles * args[at].numel()


def _row(args) -> int:
    """The size of the dimension that is sorted."""
    x = args[0]
    dim = next((value for value in args[1:] if type(value) is int), -1)
    return x.shape[dim] if x.dim() else 1


def sorted_rows(args, tensors) -> float:
    """sort(x, dim)."""
    return (SORTED if _row(args) <= 512 else SORTED_LONG) * args[0].numel()


def top(args, tensors) -> float:
    """topk(x, k, dim)."""
    numbers = args[0].numel()
    return TOP * numbers + TOP_ROW * numbers / max(1, _row((args[0], *args[2:])))


def rounds(index_at: int) -> Callable:
    """Of one block of threads through the rows of an argument."""
    return lambda args: ROUND * args[index_at].shape[0] / BLOCK if args[index_at].dim() == 2 else 0.0


def scan(args) -> float:
    """cumsum(x, dim), where a thread has a column."""
    x, dim = args[:2]
    return STEP * x.shape[dim] if x.dim() > 1 and dim not in (-1, x.dim() - 1) else 0.0


FEW_INDICES = (
    3072  # aten/src/ATen/native/cuda/Embedding.cu: up to so many, embedding_backward_feature_kernel; more are sorted
)


def few_indices(args) -> bool:
    """embedding_dense_backward(gradient, indices, rows, padding, by_frequency)."""
    return args[1].numel() <= FEW_INDICES and not args[4]


def gradients(args, tensors) -> float:
    """Of an embedding's rows: each is added to that of its index."""
    return EMBEDDING * args[0].numel()


def gradients_of_bags(args, tensors) -> float:
    """A bag's gradient is added for each of its indices; a sparse one is not added up."""
    sparse = args[9]
    return 0.0 if sparse else EMBEDDING * args[1].numel() * args[0].shape[-1]
