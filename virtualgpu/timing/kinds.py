"""Kinds of kernels that are bound by memory: how often they move their tensors, and what limits them.

A batch norm of channels-first images takes a while at least: one block of 512 threads has a whole channel. So few channels leave most of a large GPU idle, and a thread waits for each of its numbers (aten/src/ATen/native/cuda/Normalization.cuh,
batch_norm_collect_statistics_kernel and batch_norm_backward_kernel; cuDNN's bn_fw_tr_1C11_kernel_NCHW and bn_bw_1C11_kernel_new have the
same blocks). PyTorch takes its own kernels for weights in 16 bits and for bfloat16 (Normalization.cpp), cuDNN's for all else.
Channels-last images are cut into tiles, and know no such bound.
"""

import functools
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

THREADS = 512
# Cycles from one number of a thread to its next. Of PyTorch's kernels: statistics 0.59 us on a V100 (NVIDIA's PyProf, 64 x 64 x 112 x 112),
# 0.40 us on an H20 (FlagGems #5754), backward 0.72 us on an H20 (#4086); of cuDNN's: forward 0.27 us on an H100, 0.35 on its PCIe card,
# 0.36 on a B200 and 0.65 on an A100 (KernelBench, BatchNorm; the median), backward 0.69 us on an H20 (FlagGems #4250)
STATISTICS, BACKWARD = 800, 1400
CUDNN_FORWARD, CUDNN_BACKWARD = 650, 1360


class Least(NamedTuple):
    """blocks, and the cycles that each takes. part: of the kernel's bytes, what these blocks move; the rest is moved by another kernel."""

    blocks: int
    cycles: float
    part: float = 1.0

    def seconds(self, spec) -> float:
        """On that card, whose multiprocessors hold a few blocks each."""
        rounds = -(-self.blocks // (spec.processors * max(1, spec.limits.threads // THREADS)))
        return rounds * self.cycles / (1e3 * spec.clock_rate)


def batch_norm(args) -> Least | None:
    """native_batch_norm(input, weight, ...) in training."""
    image, weight = args[0], args[1]
    if image.dim() < 3 or image.stride(1) == 1:
        return None
    return _least(image.shape, image.dtype == torch.bfloat16 or _is_half(weight))


def _is_half(weight) -> bool:
    """Also where it goes to the CPU's kernel in single precision (engine/mixed_batch_norm.py)."""
    return weight is not None and (weight.itemsize == 2 or hasattr(weight, "stands_for_half"))


def batch_norm_backward(args) -> Least | None:
    """native_batch_norm_backward(gradient, input, weight, ..., train, eps, mask)."""
    image, weight = args[1], args[2]
    if image.dim() < 3 or image.stride(1) == 1:
        return None
    return _least_backward(image.shape, not args[7] or image.dtype == torch.bfloat16 or _is_half(weight))


@functools.lru_cache(4096)
def _least(shape, own: bool) -> Least:
    """own: by PyTorch's kernels, the statistics apart."""
    if own:
        return Least(shape[1], _steps(shape) * STATISTICS, 1 / 3)
    return Least(shape[1], _steps(shape) * CUDNN_FORWARD)


@functools.lru_cache(4096)
def _least_backward(shape, own: bool) -> Least:
    return Least(shape[1], _steps(shape) * (BACKWARD if own else CUDNN_BACKWARD))


def _steps(shape) -> int:
    """Numbers that one thread works on."""
    places = prod(shape[2:])
    wide = next((width for width in (32, 64, 128, 256) if places <= width), THREADS)
    return -(-places // wide) * -(-shape[0] // (THREADS // wide))


class Kind(NamedTuple):
    """traffic: bytes really moved over those of all tensors that go in or come out, once. limit: whose share of the bandwidth it has
    (`hardware.achieved`). launches: kernels that the operation is made of. training: at which argument it is told whether this is
    training; where it is not, nothing is read twice. wide: traffic where a row does not fit beside a multiprocessor. blocks: by the
    arguments, what the kernel takes at least (`Least`). elementwise: each number comes of those at its own place. made: only what comes out
    counts. rows: the argument whose rows one block goes through. per_cycle: bytes that a multiprocessor moves in
    one, at most, in the last of its kernels. cycles: of a multiprocessor, for each number of the largest tensor, at least; or a function of
    the arguments and tensors that says how many in all. more: such a function, of what comes on top."""

    traffic: float = 1.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    wide: float | None = None
    blocks: Callable | None = None
    elementwise: bool = False
    made: bool = False
    rows: int | None = None
    per_cycle: float | None = None
    cycles: float | Callable | None = None
    more: Callable | None = None
    least: float = 0.0  # what `cycles` and `more` come to in a call
    beyond: float = 0.0

    def evaluates(self, args) -> bool:
        """Is this call no training, of a kind that tells the two apart?"""
        return self.training is not None and not args[self.training]

    def in_call(self, args, tensors) -> "Kind":
        """What it is for these arguments, and these tensors that go in or come out."""
        if self.elementwise:
            if is_transposed(tensors):
                return self._replace(least=TRANSPOSED * tensors[-1].numel())
            bytes_per_cycle = one_by_one(tensors)
            if bytes_per_cycle is None:
                return self
            return CALLS[bytes_per_cycle] if self is ELEMENTWISE else self._replace(per_cycle=bytes_per_cycle)
        if self.evaluates(args):
            return self._replace(traffic=1.0, launches=1, blocks=None, least=EVALUATING * tensors[0].numel())
        if self.wide is not None and tensors[0].dim():
            row = tensors[0].shape[-1] * tensors[0].itemsize
            if row * (len(tensors) - 1) > ROW:  # the backward pass reads two tensors
                self = self._replace(traffic=self.wide)
        if self.cycles is not None:
            each = self.cycles
            total = each(args, tensors) if callable(each) else each * max(tensor.numel() for tensor in tensors)
            self = self._replace(least=total)
        return self if self.more is None else self._replace(beyond=self.more(args, tensors))

    def latency(self, args) -> float:
        """Seconds beyond those for what it moves, of a kind with `rows`."""
        rows = args[self.rows]
        return ROUND * rows.shape[0] / BLOCK if rows.dim() == 2 else 0.0


def one_by_one(tensors) -> float | None:
    """Bytes that a multiprocessor moves in a cycle in an elementwise kernel that does not read 16 bytes at once: where its tensors differ
    in their layout (one is broadcast, say) or in their type (CUDALoops.cuh: launch_vectorized_kernel, or one number at a time). That is
    seen where numbers have 16 bits; None elsewhere."""
    halves, single, layouts = False, False, set()
    for tensor in tensors:
        if tensor.dim():
            size = tensor.itemsize
            halves |= size == 2
            single |= size == 4 and tensor.is_floating_point()
            layouts.add((tensor.numel(), tensor.stride()) if tensor.layout is torch.strided else None)
    if not halves or (single and len(tensors) == 2 and tensors[-1].itemsize == 2):
        return None  # what makes 16 bits of 32 reads 16 bytes at once (vectorized_elementwise_kernel on an H100)
    return CONVERTED if single else UNVECTORIZED if len(layouts) > 1 else None


def is_transposed(tensors) -> bool:
    """Do neighbours in the first tensor's memory lie apart in the last one's?"""
    first, last = tensors[0], tensors[-1]
    if first.shape != last.shape or first.layout is not torch.strided or last.layout is not torch.strided:
        return False
    return _innermost(first) != _innermost(last) and first.numel() == _span(first)


def _innermost(tensor) -> int | None:
    """The dimension along which memory runs."""
    return next(
        (dim for dim in reversed(range(tensor.dim())) if tensor.stride(dim) == 1 and tensor.size(dim) > 1), None
    )


def _span(tensor) -> int:
    """Numbers from its first to its last: more than it has where it leaves some out, fewer where it repeats some."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# Measured on an H100 (tests/gpu/h100_kernels.csv, PyTorch 2.11): cycles of a multiprocessor for each number that is copied to where its
# neighbours lie apart (2.2 in 32 bits, 1.9 in 16; channels first to last alike)
TRANSPOSED = 2.0
# Liger-Kernel's eager PyTorch columns on an A100-80GB (BSD 2-Clause, 2024), largest sizes: rotary embedding in bfloat16 takes 2.0 times its
# bytes; RMS norm, bfloat16 with float32 between, 1.34 times, which leaves 1.7 for its three kernels that convert; of its 11.8 bytes a cycle
# and multiprocessor that is 5.9 and 6.9. In float32 alone broadcast operands cost nothing, also on an H100 (add and RMS norm: 0.98 to 1.05)
UNVECTORIZED, CONVERTED = 5.9, 6.9
# nll_loss runs on one block, which waits for memory in each round: 1,024 threads, 18 to 21 us for 16384 rows on an H100 (PyTorch 2.11)
BLOCK, ROUND = 1024, 1e-6
PLAIN = Kind()
ELEMENTWISE = Kind(elementwise=True)
CALLS = {limit: Kind(elementwise=True, per_cycle=limit) for limit in (UNVECTORIZED, CONVERTED)}
# Cycles of a multiprocessor for each number, of kernels that no memory holds up, all measured on an H100 (tests/gpu/h100_kernels.csv,
# PyTorch 2.11; in 16 bits, where it shows): PyTorch's batch norm of channels-last images (cuDNN's, of float16 and float32, is bound by
# memory), and any batch norm that evaluates; group norm; softmax and layer norm, and a row of the latter
LAST, LAST_BACKWARD, EVALUATING = 1.4, 1.2, 0.62
GROUPS, GROUPS_BACKWARD = 1.3, 1.75
ROWS, SHORT_ROW = 0.5, 386
# A pool's for each number that it looks at, or makes going back; an embedding's for each number of a gradient, beside zeros and sorting
POOL, POOL_BACKWARD, EMBEDDING = 0.45, 2.7, 4.7
# A row that is looked up (1.6 thousand million rows of 64 numbers a second), and a number that index_add adds, by an atomic operation
LOOKED_UP, ADDED = 163, 4
# A sum of columns, for each number, where there are no more of them than NARROW (0.45 to 0.75 for 64 to 1024)
COLUMNS, NARROW = 0.5, 2048


def _own_channels_last(cycles: float, image_at: int, weight_at: int) -> Callable:
    def total(args, tensors) -> float:
        """Of PyTorch's own kernels; 0 where cuDNN's run."""
        image, weight = args[image_at], args[weight_at]
        last = image.dim() > 2 and image.stride(1) == 1
        return cycles * image.numel() if last and (image.dtype == torch.bfloat16 or _is_half(weight)) else 0.0

    return total


def _layer_norm(args, tensors) -> float:
    numbers = tensors[0].numel()
    return max(ROWS * numbers, SHORT_ROW * numbers / max(1, prod(args[1])))


def _layer_norm_backward(args, tensors) -> float:
    """1.1 for each number, 800 for each row: rows of 128 to 4096 take 10 to 1.25 a number."""
    numbers = tensors[0].numel()
    return 1.1 * numbers + 800 * numbers / max(1, prod(args[2]))


def _sum(args, tensors) -> float:
    """Of sum(input, dims): where the last dimension stays, threads next to each other add up columns."""
    numbers = tensors[0]
    dims = args[1] if len(args) > 1 and args[1] else ()
    if not dims or not numbers.dim() or -1 in dims or numbers.dim() - 1 in dims or numbers.stride(-1) != 1:
        return 0.0
    return COLUMNS * numbers.numel() if numbers.shape[-1] <= NARROW else 0.0


def _rows_of(index_at: int) -> Callable:
    return lambda args, tensors: LOOKED_UP * args[index_at].numel()


def _pool(args, tensors) -> float:
    sizes = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    sides = tuple(sizes) * (2 if len(sizes) == 1 else 1)
    return POOL * prod(sides) * tensors[-1].numel()


# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more; an H100 reads rows
# of 98 KiB once, and of 125 KiB more often
ROW = 112 << 10
# Twice over what goes in: once for its mean and variance or its sums, once for the result (aten/src/ATen/native/cuda: Normalization.cuh
# for batch norm, layer_norm_kernel.cu and group_norm_kernel.cu, whose backward passes sum up gradients of weight and bias apart)
KINDS = {
    "native_batch_norm": Kind(1.5, training=5, blocks=batch_norm, cycles=_own_channels_last(LAST, 0, 1)),
    "_native_batch_norm_legit": Kind(1.5, training=5, blocks=batch_norm, cycles=_own_channels_last(LAST, 0, 1)),
    "_batch_norm_with_update": Kind(1.5, blocks=batch_norm, cycles=_own_channels_last(LAST, 0, 1)),
    "cudnn_batch_norm": Kind(1.5, training=5, blocks=batch_norm),
    "native_batch_norm_backward": Kind(
        5 / 3, launches=2, blocks=batch_norm_backward, cycles=_own_channels_last(LAST_BACKWARD, 1, 2)
    ),
    "batch_norm_backward": Kind(5 / 3, launches=2),
    "native_group_norm": Kind(1.5, launches=2, cycles=GROUPS),
    "native_group_norm_backward": Kind(5 / 3, launches=3, cycles=GROUPS_BACKWARD),
    "native_layer_norm": Kind(1.0, "layer_norm", cycles=_layer_norm),
    "native_layer_norm_backward": Kind(5 / 3, "layer_norm", 3, cycles=_layer_norm_backward),
    "_fused_rms_norm": Kind(1.0, "layer_norm", cycles=_layer_norm),
    "_fused_rms_norm_backward": Kind(5 / 3, "layer_norm", 2),
    "_softmax": Kind(1.0, "softmax", wide=1.8, cycles=ROWS),
    "_log_softmax": Kind(1.0, "softmax", wide=1.8, cycles=ROWS),
    # gradient times result is a kernel of its own (aten/src/ATen/native/cuda/SoftMax.cu)
    "_softmax_backward_data": Kind(2.0, launches=2),
    "_log_softmax_backward_data": Kind(1.0, "softmax", wide=1.2),
    "max_pool2d_with_indices": Kind(cycles=_pool),
    "max_pool2d_with_indices_backward": Kind(launches=2, cycles=POOL_BACKWARD),
    "nll_loss_forward": Kind(made=True, rows=0),
    "nll_loss_backward": Kind(made=True, rows=1, launches=2),  # zeros, and a number in each row
    "masked_fill": Kind(2.0, launches=2, elementwise=True),  # a copy, filled in place
    "masked_fill_": ELEMENTWISE,
    "_to_copy": ELEMENTWISE,
    "copy_": ELEMENTWISE,
    "clone": ELEMENTWISE,
    "embedding": Kind(2.0, made=True, cycles=_rows_of(1)),  # vectorized_gather_kernel
    "sum": Kind(cycles=_sum),
    "index_select": Kind(2.0, made=True, cycles=_rows_of(2)),
    "index_add": Kind(launches=2, cycles=lambda args, tensors: ADDED * args[3].numel()),
    "index_add_": Kind(cycles=lambda args, tensors: ADDED * args[3].numel()),
    # sorted indices, then sums of equal ones: thrust::sort_by_key and four kernels (EmbeddingBackwardKernel.cu)
    "embedding_dense_backward": Kind(1.0, launches=12, more=lambda args, tensors: EMBEDDING * args[0].numel()),
    "index_put_": Kind(1.0, launches=8),
    "_index_put_impl_": Kind(1.0, launches=8),
    "topk": Kind(2.0, launches=4),
    "sort": Kind(6.0, launches=6),
    "nonzero": Kind(1.0, launches=4),
}
