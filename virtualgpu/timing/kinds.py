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
    if not args[7] or image.dim() < 3 or image.stride(1) == 1:
        return None
    return _least_backward(image.shape, image.dtype == torch.bfloat16 or _is_half(weight))


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
    counts. gathers: number by number. rows: the argument whose rows one block goes through. per_cycle: bytes that a multiprocessor moves in
    one, at most, in the last of its kernels."""

    traffic: float = 1.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    wide: float | None = None
    blocks: Callable | None = None
    elementwise: bool = False
    made: bool = False
    gathers: bool = False
    rows: int | None = None
    per_cycle: float | None = None

    def in_call(self, args, tensors) -> "Kind":
        """What it is for these arguments, and these tensors that go in or come out."""
        if self.elementwise:
            bytes_per_cycle = one_by_one(tensors)
            if bytes_per_cycle is None:
                return self
            return CALLS[bytes_per_cycle] if self is ELEMENTWISE else self._replace(per_cycle=bytes_per_cycle)
        if self.training is not None and not args[self.training]:
            return PLAIN
        if self.wide is not None and tensors[0].dim():
            row = tensors[0].shape[-1] * tensors[0].itemsize
            if row * (len(tensors) - 1) > ROW:  # the backward pass reads two tensors
                return self._replace(traffic=self.wide)
        if self.gathers:
            return self._replace(per_cycle=GATHERED * tensors[-1].itemsize)
        return self

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
    if not halves:
        return None
    return CONVERTED if single else UNVECTORIZED if len(layouts) > 1 else None


# Liger-Kernel's eager PyTorch columns on an A100-80GB (BSD 2-Clause, 2024), largest sizes: rotary embedding in bfloat16 takes 2.0 times its
# bytes; RMS norm, bfloat16 with float32 between, 1.34 times, which leaves 1.7 for its three kernels that convert; of its 11.8 bytes a cycle
# and multiprocessor that is 5.9 and 6.9. In float32 alone broadcast operands cost nothing, also on an H100 (add and RMS norm: 0.98 to 1.05).
# An embedding (index_select: an index before each number) makes 82 to 87 thousand million numbers a second: 0.7 bytes for each byte of one
UNVECTORIZED, CONVERTED, GATHERED = 5.9, 6.9, 0.7
# nll_loss runs on one block of 32 threads (Loss.cu: NLL_LOSS_THREADS), which waits for memory in each round: Liger-Kernel's cross entropy, 16384
# rows of 4096 to 16384: 0.5 ms beyond the log_softmax
BLOCK, ROUND = 32, 1e-6
PLAIN = Kind()
ELEMENTWISE = Kind(elementwise=True)
CALLS = {limit: Kind(elementwise=True, per_cycle=limit) for limit in (UNVECTORIZED, CONVERTED)}
# Bytes of a row of a softmax beyond which it is read once more for the maximum and once for the sum: Liger-Kernel's cross entropy on an A100
# (BSD 2-Clause, 2024), 16384 rows of float32 in PyTorch: 1,100 GB/s with 64 KiB a row, 820 to 830 with 128 KiB and more
ROW = 96 << 10
# Twice over what goes in: once for its mean and variance or its sums, once for the result (aten/src/ATen/native/cuda: Normalization.cuh
# for batch norm, layer_norm_kernel.cu and group_norm_kernel.cu, whose backward passes sum up gradients of weight and bias apart)
KINDS = {
    "native_batch_norm": Kind(1.5, training=5, blocks=batch_norm),
    "_native_batch_norm_legit": Kind(1.5, training=5, blocks=batch_norm),
    "_batch_norm_with_update": Kind(1.5, blocks=batch_norm),
    "cudnn_batch_norm": Kind(1.5, training=5, blocks=batch_norm),
    "native_batch_norm_backward": Kind(5 / 3, launches=2, blocks=batch_norm_backward),
    "batch_norm_backward": Kind(5 / 3, launches=2),
    "native_group_norm": Kind(1.5, launches=2),
    "native_group_norm_backward": Kind(5 / 3, launches=3),
    "native_layer_norm": Kind(1.0, "layer_norm"),
    "native_layer_norm_backward": Kind(5 / 3, "layer_norm", 3),
    "_fused_rms_norm": Kind(1.0, "layer_norm"),
    "_fused_rms_norm_backward": Kind(5 / 3, "layer_norm", 2),
    "_softmax": Kind(1.0, "softmax", wide=1.8),
    "_log_softmax": Kind(1.0, "softmax", wide=1.8),
    "_softmax_backward_data": Kind(1.0, "softmax", wide=2.05),
    "_log_softmax_backward_data": Kind(1.0, "softmax", wide=2.05),
    "nll_loss_forward": Kind(made=True, rows=0),
    "nll_loss_backward": Kind(made=True, rows=1, launches=2),  # zeros, and a number in each row
    "masked_fill": Kind(2.0, launches=2, elementwise=True),  # a copy, filled in place
    "masked_fill_": ELEMENTWISE,
    "_to_copy": ELEMENTWISE,
    "copy_": ELEMENTWISE,
    "embedding": Kind(2.0, made=True, gathers=True),
    # sorted indices, then sums of equal ones: thrust::sort_by_key and four kernels (EmbeddingBackwardKernel.cu)
    "embedding_dense_backward": Kind(1.0, launches=12),
    "index_put_": Kind(1.0, launches=8),
    "_index_put_impl_": Kind(1.0, launches=8),
    "topk": Kind(2.0, launches=4),
    "sort": Kind(6.0, launches=6),
    "nonzero": Kind(1.0, launches=4),
}
