"""Depthwise convolutions, one channel by itself: how long they take on a card, by PyTorch's own kernels or by cuDNN's.

Both move an image in and out and do little with it; which of the two runs decides PyTorch (use_cudnn_depthwise in
ATen/native/Convolution.cpp).
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

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
# cuDNN's in single precision, channels last, of 7x7 and larger: cycles of a multiprocessor for each product (cuDNN 9.19 on an H100, TF32 allowed;
# 96 x 56 x 56 and 384 x 14 x 14, 64 images: 0.090 and 0.100, 0.096 and 0.106, 1.16 and 1.55). A ConvNeXt comes to them unasked: its norms leave
# channels last. Earlier cards are supposed alike: there no kernel was measured, and a ConvNeXt of two cards was 1.65 times too fast without. Of 3x3
# the rule above is 0.6 to 1.2 times off
LARGE, SINGLE = 49, {"forward": 0.095, "image": 0.10, "weight": 1.35}
SQUARES = (1, 3, 5)  # what PyTorch leaves to cuDNN: see _left_to_cudnn


class Convolution(NamedTuple):
    """What is asked: of image [batch, channels, *size] and weight."""

    image: torch.Tensor
    weight: torch.Tensor
    stride: Sequence[int]
    dilation: Sequence[int]

    @property
    def by_pytorch(self) -> bool:
        """By PyTorch's own kernels, which add the bias as well."""
        return self.image.stride(1) != 1 and not self._left_to_cudnn()

    def _left_to_cudnn(self) -> bool:
        """Channels first, in float16: as check_cudnn_depthwise_workload_with_filter decides (ATen/native/Convolution.cpp, PyTorch 2.11).
        bfloat16 takes PyTorch's own, and as long as float32."""
        batch, channels, *size = self.image.shape
        if (
            self.image.dtype != torch.float16
            or channels < 32
            or set(self.dilation) != {1}
            or len(set(self.stride)) != 1
        ):
            return False
        stride, kernel, width = self.stride[0], self.weight.shape[-1], size[-1]
        if len(size) != 2 or size[0] == 1:
            return len(size) < 3 and stride == 1
        if len(set(self.weight.shape[2:])) != 1 or kernel not in SQUARES or width < 7 or stride > 2:
            return False
        if stride == 1:
            return True
        if batch == 1:
            return kernel > 1 or width <= 28
        if kernel == 1:
            return batch <= 16 and channels >= 128 and width <= 7
        return channels >= 512 or (channels >= 256 and width >= 28)


def is_depthwise(weight, groups: int) -> bool:
    """Does each channel of the weight [channels, 1, *kernel] see one of the image alone?"""
    return groups > 1 and weight.shape[1] == 1


def seconds(kernels: Kernels, which: str, of: Convolution, made, read, moved) -> float:
    """`which`: forward, or the gradient of the "image" or of the "weight". made, read: the images that come out and go in, or that both go
    in. moved: bytes in and out."""
    spec, taps = kernels.spec, prod(of.weight.shape[2:])
    if of.by_pytorch:
        number, tap = CYCLES[kernels.generation]
        cycles = made.numel() * (number + tap * taps) / spec.processors
        own = spec.kernel + max(moved / kernels.bandwidth["memory"], cycles / (1e3 * spec.clock_rate))
        return own * GRADIENT.get(which, 1.0)
    if made.dtype == torch.float32 and taps >= LARGE:
        numbers = min(made.numel(), read.numel())  # the smaller one's meet each weight once
        return spec.kernel + max(moved / (spec.bandwidth * BANDWIDTH), SINGLE[which] * numbers * taps / kernels.cycles)
    bound = 2 * made.numel() * taps / (spec.rates[FLOAT32] * FLOPS)
    by_cudnn = (spec.kernel + max(moved / (spec.bandwidth * BANDWIDTH), bound)) * OF_CUDNNS.get(which, 1.0)
    # channels first, in float16, it takes on an H100 what it takes channels last and two reorderings: 188 to 199 us for 76 to 94, and 149 to 181
    # for 59 to 88. Earlier cards are supposed to do without: no kernel was measured there
    return by_cudnn + sum(
        kernels.reordering(image) for image in (made, read) if kernels.hopper and image.stride(1) != 1
    )
