"""Depthwise convolutions, one channel by itself: how long they take on a card, by PyTorch's own kernels or by cuDNN's.

Both move an image in and out and do little with it; which of the two runs decides PyTorch (use_cudnn_depthwise in
ATen/native/Convolution.cpp).
"""

from math import prod

import torch

from virtualgpu.hardware.datasheet import FLOAT32
from virtualgpu.timing.kernels import Kernels

# A depthwise convolution by cuDNN (channels last, or 16 bits) reaches so much of the bandwidth and of the float32 FLOP/s: cuDNN 9.19 on an H100
# (tests/gpu/h100_kernels.csv, conv2d_c1_k1_nhwc), a kernel of 3 and of 7. In 2022 it was 0.36 and 0.08 (RepLKNet, arXiv 2203.06717, 2080 Ti)
BANDWIDTH, FLOPS = 0.55, 0.19
# PyTorch's own kernels take so many cycles of a multiprocessor for each number that they make, and for each of its products: RepLKNet as
# above (kernels 3 and 7), KernelBench (A10G; 3x1, 3x3, 3x7): within 30 %. float16 takes as long (FlagGems #1697, H20). On an H100 (PyTorch 2.11;
# kernels 3, 5 and 7) less for a number and more for a product
CYCLES = {"before Hopper": (2.6, 0.125), "Hopper": (1.05, 0.16)}
# Their backward passes over that: on an H100 (PyTorch 2.11, six convolutions) 1.1 to 2 and 1.5 to 2.7 times; together 3.6 in pytorch #129609
# (2024), and 17 and 25 years before (#18631, #62006)
GRADIENT = {"image": 1.6, "weight": 2}
OF_CUDNNS = {"image": 1.7, "weight": 1.15}  # by cuDNN's: 1.4 to 2.2, and 1 to 1.4
# Kernels of a depthwise convolution in float16, of 32 channels and more, that PyTorch leaves to cuDNN (use_cudnn_depthwise in
# ATen/native/Convolution.cpp: "only for FP16"); bfloat16 takes PyTorch's own, and as long as float32
BY_CUDNN = (1, 3, 5)


def is_depthwise(weight, groups: int) -> bool:
    """Does each channel of the weight [channels, 1, *kernel] see one of the image alone?"""
    return groups > 1 and weight.shape[1] == 1


def by_pytorch(weight, groups: int, made) -> bool:
    """A depthwise convolution by PyTorch's own kernels, which add the bias as well."""
    narrow = made.dtype == torch.float16 and made.shape[1] >= 32
    narrow = narrow and len(set(weight.shape[2:])) == 1 and weight.shape[-1] in BY_CUDNN
    return is_depthwise(weight, groups) and made.stride(1) != 1 and not narrow


def gradient_seconds(kernels: Kernels, which: str, weight, image, gradient, moved) -> float:
    """Of the "image" or of the "weight", from the `gradient` of what was made."""
    over = GRADIENT if by_pytorch(weight, weight.shape[0], gradient) else OF_CUDNNS
    return over[which] * forward_seconds(kernels, weight, image if which == "image" else gradient, moved)


def forward_seconds(kernels: Kernels, weight, made, moved) -> float:
    """`made`: the image that comes out; `moved`: bytes in and out."""
    spec, taps = kernels.spec, prod(weight.shape[2:])
    if not by_pytorch(weight, weight.shape[0], made):
        flops = 2 * made.numel() * taps
        bound = flops / (spec.rates[FLOAT32] * FLOPS)
        return spec.kernel + max(moved / (spec.bandwidth * BANDWIDTH), bound)
    number, tap = CYCLES[kernels.generation]
    cycles = made.numel() * (number + tap * taps) / spec.processors
    return spec.kernel + max(moved / kernels.bandwidth["memory"], cycles / (1e3 * spec.clock_rate))
