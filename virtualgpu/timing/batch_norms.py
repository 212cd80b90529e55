"""Batch norm: what its kernels take beyond the bytes that they move.

Channels-first images take a while at least: one block of 512 threads has a whole channel. So few channels leave most of a large GPU idle,
and a thread waits for each of its numbers (aten/src/ATen/native/cuda/Normalization.cuh, batch_norm_collect_statistics_kernel and
batch_norm_backward_kernel; cuDNN's bn_fw_tr_1C11_kernel_NCHW and bn_bw_1C11_kernel_new have the same blocks). PyTorch takes its own kernels
for weights in 16 bits and for bfloat16 (Normalization.cpp), cuDNN's for all else. Channels-last images are cut into tiles, and know no such
bound: there PyTorch's own kernels are held up by their arithmetic, cuDNN's by memory.
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


# Cycles of a multiprocessor for each number of a channels-last image, measured on an H100 (PyTorch 2.11, in bfloat16)
LAST, LAST_BACKWARD = 1.4, 1.2


def own_channels_last(cycles: float, image_at: int, weight_at: int) -> Callable:
    """Of PyTorch's own kernels, by the places of the image and of the weight among the arguments; 0 where cuDNN's run."""

    def total(args, tensors) -> float:
        image, weight = args[image_at], args[weight_at]
        last = image.dim() > 2 and image.stride(1) == 1
        return cycles * image.numel() if last and (image.dtype == torch.bfloat16 or _is_half(weight)) else 0.0

    return total
