"""Memory that CUDA's kernels take for themselves and give back with the end of the call: it shows in peaks, and in reserved memory.

Each rule says how many bytes each such block has, in the order in which they are asked for. Measured on an H100, PyTorch 2.11, 2026-11-26;
the sources are files of aten/src/ATen/native/cuda.
"""

from functools import partial

import torch

from virtualgpu.engine import convolution_workspaces, reductions
from virtualgpu.timing.memory_bound import COPIED, copied_first, few_indices
from virtualgpu.timing.reductions import NAMES

MEAN_OR_SUM = (1, 2)  # at::Reduction


def loss(args, kwargs, out, gpu) -> list[int]:
    """A loss that is added up afterwards: one of each entry first (BinaryMiscOpsKernels.cu, Loss.cu)."""
    reduction = next((value for value in args[2:] if type(value) is int), kwargs.get("reduction", 1))
    if reduction not in MEAN_OR_SUM:
        return []
    entries = args[0] if args[0].numel() >= args[1].numel() else args[1]
    return [entries.nbytes, *reductions.over_all(entries, gpu.spec)]


def loss_within(args, kwargs, out, gpu) -> list[int]:
    """A loss whose entries lie in the memory of its result, which becomes small at last (Loss.cpp)."""
    reduction = next((value for value in args[2:] if type(value) is int), kwargs.get("reduction", 1))
    return [out.itemsize, *reductions.over_all(args[0], gpu.spec)] if reduction in MEAN_OR_SUM else []


def soft_margin_backward(args, kwargs, out, gpu) -> list[int]:
    """-target, and its product with the input (soft_margin_loss_backward_out in Loss.cpp)."""
    return [out.nbytes, out.nbytes]


def count_nonzero(args, kwargs, out, gpu) -> list[int]:
    """What is not zero, and that as int64, which is added up (count_nonzero_cuda in TensorCompare.cpp)."""
    whole = torch.empty_like(args[0], dtype=torch.int64, device="meta")
    return [args[0].numel(), whole.nbytes, *reductions.held("sum", (whole, *args[1:]), {}, out, gpu)]


def with_logits(args, kwargs, out, gpu) -> list[int]:
    """binary_cross_entropy_with_logits is made of plain operations: the loss of each entry, and another block of its size (Loss.cpp)."""
    entries, reduction = args[0], args[4] if len(args) > 4 else kwargs.get("reduction", 1)
    if reduction not in MEAN_OR_SUM:
        return [entries.nbytes]
    return [entries.nbytes, entries.nbytes, *reductions.over_all(entries, gpu.spec)]


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
    "convolution": convolution_workspaces.forward,
    "convolution_backward": convolution_workspaces.backward,
    "embedding_dense_backward": embedding_backward,
    "_embedding_bag_backward": embedding_bag_backward,
    "index_put": index_put,
    "index_put_": index_put,
    "_index_put_impl_": index_put,
    "sort": sort,
    "argsort": sort,
    **{name: partial(reductions.held, name) for name in NAMES},
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
