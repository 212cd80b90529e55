"""Convolutions, plain, grouped, depthwise and transposed, of 1, 2 or 3 dimensions: their FLOPs, and how long they take on a card.

FLOPs: each number of the weight meets each place of the image once: of the result, or, transposed, of what goes in. A weight is [channels,
channels / groups, *kernel], so that groups count by its size alone. Of the three sums of such products (the result, the gradient of
what went in, that of the weight) none has more terms than another; `torch.utils.flop_counter` leaves groups out of the third.

Seconds: a convolution is a product of matrices (implicit GEMM), in single precision of 3x3 before Hopper with fewer multiplications (Winograd).
Larger ones than 1x1 want the channels last on tensor cores, and convert images that have them first: of Volta's, Turing's and TF32's kernels only
what is read, as they write channels first ("..._nhwc2nchw" in traces). Depthwise ones do little but move an image in and out.

What kernels took on a card over that is a median of their kind: `data/convolutions.csv`, written by `python -m tests.gpu.tables`.
`python -m tests.accuracy.convolutions` sets both beside others' (DeepBench, KernelBench, NeuSight, dlperf, kineto, spio).
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT16, FLOAT32, TF32
from virtualgpu.timing import reductions
from virtualgpu.timing.kernels import Kernels, measured_rows

# Tensor cores take so many channels at once, and more are filled up to a multiple; fewer are left to the other cores (implicit_convolve_sgemm)
CHANNELS = 8
# Time over that of a plain product of the same sizes and type: DeepBench's medians. 1x1 on tensor cores loses as much; larger ones there do not
DIRECT = {"forward": 1.1, "image": 1.4, "weight": 1.6}
# Winograd's ways (3x3 of stride 1 in single precision): places of a square each way, which take (that + 2)^2 products of matrices; images, rows and
# columns that are filled up to a multiple; time over that of the products. In one kernel (winograd_128x128_.._tile148t: blocks of 8 x 16 places),
# and by sgemm, with image, weight and result turned in memory before and after (winograd_nonfused), the one way for the gradient of the weight
# (cudnnConvolutionBwdFilterAlgo_t). Fitted to half of NeuSight's shapes, over the cards' medians; Hopper's traces have neither
WINOGRAD = (2, (1, 8, 16), 0.9), (4, (1, 4, 4), 1.3)
# Narrower groups are done side by side as one of so many channels, zeros between them (cuDNN's kernels "tilesize64x64x64_..._g8"): spio's, 3x3 over
# 64 channels in groups of 8, takes what a dense one does at the rate of large products (73 TFLOPS counted so on an RTX 3090, 144 on a 4090)
MERGED = 64
# Depthwise by cuDNN (channels last, or float16): the share of the bandwidth and of the float32 FLOP/s (9.19 on an H100; RepLKNet, 2022: 0.36, 0.08)
BANDWIDTH, FLOPS = 0.55, 0.19
# Depthwise by PyTorch's own kernels: cycles of a multiprocessor for each number that they make, and for each of its products. RepLKNet (arXiv
# 2203.06717, kernels 3 and 7), KernelBench (A10G; 3x1, 3x3, 3x7): within 30 %. float16 takes as long (FlagGems #1697, H20)
CYCLES = {"before Hopper": (2.6, 0.125), "Hopper": (1.05, 0.16)}
# What its gradients take over that, by cuDNN and by PyTorch, on an H100: 1 to 2.2, and 1.1 to 2.7 times
GRADIENT = {"forward": (1.0, 1.0), "image": (1.7, 1.6), "weight": (1.15, 2.0)}
# cuDNN's in single precision, channels last, of 7x7 and larger: cycles of a multiprocessor for each product (cuDNN 9.19 on an H100: 96 x 56 x 56 and
# 384 x 14 x 14, 64 images). A ConvNeXt comes to them unasked: its norms leave channels last
LARGE, SINGLE = 49, {"forward": 0.095, "image": 0.10, "weight": 1.35}
# What the table tells apart, its word for all sizes together, and the FLOPs of a pass between its classes of size
KIND, ANY, SIZES = ("pass", "kind", "dtype", "layout", "size"), "any", (2e9, 2e10)
# Where one type of 16 bits was not measured, the other's row stands for it: the same kernels, compiled for both
OTHER_HALF = {FLOAT16: BFLOAT16, BFLOAT16: FLOAT16}


def forward_flops(x, weight, bias, stride, padding, dilation, transposed, *args, out_val=None, **kwargs) -> int:
    """Of convolution and _convolution. x: [batch, channels, *size], as is their result `out_val`."""
    return _flops(x if transposed else out_val, weight)


def backward_flops(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask, **kwargs
) -> int:
    """Of convolution_backward: for each gradient that `output_mask` asks for as much as forwards; the bias's is a sum, no product."""
    return sum(output_mask[:2]) * _flops(x if transposed else grad, weight)


def slow_forward_flops(x, weight, *args, out_val=None, **kwargs) -> int:
    """Of _slow_conv2d_forward."""
    return _flops(out_val, weight)


def _flops(image, weight) -> int:
    """Of one such sum; image: [batch, channels, *size]."""
    return 2 * image.shape[0] * prod(image.shape[2:]) * weight.numel()


class Pass(NamedTuple):
    """One of a plain convolution's: "forward" reads `image` and makes `output`, "image" is the gradient of what it read, "weight" that of its weight. A
    transposed one is an "image". image, output: [batch, channels, *size]; weight: [channels out, channels in / groups, *kernel]. key: into Spec.rates."""

    which: str
    image: torch.Tensor
    output: torch.Tensor
    weight: torch.Tensor
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int
    key: str

    @property
    def taps(self) -> int:
        """Places of the weight."""
        return prod(self.weight.shape[2:])

    @property
    def moved(self) -> int:
        """Bytes in and out."""
        return sum(one.numel() for one in (self.image, self.output, self.weight)) * self.image.itemsize

    @property
    def depthwise(self) -> bool:
        """Does each channel see one of the image alone?"""
        return self.groups > 1 and self.weight.shape[1] == 1

    @property
    def side_by_side(self) -> bool:
        """Do its groups fill MERGED channels? cuDNN has kernels for these, which take a third to a sixth of what others' take (H100, channels last)."""
        made, width = self.weight.shape[0] // self.groups, self.weight.shape[1]
        whole = (width >= 4 and MERGED % width == 0) or width % MERGED == 0
        return made == width and whole and (self.groups * width) % MERGED == 0

    @property
    def by_pytorch(self) -> bool:
        """By PyTorch's own kernels for depthwise ones, which add the bias as well (use_cudnn_depthwise in ATen/native/Convolution.cpp)."""
        return self.depthwise and self.image.stride(1) != 1 and not self._left_to_cudnn()

    def _left_to_cudnn(self) -> bool:
        """As check_cudnn_depthwise_workload_with_filter decides (PyTorch 2.11), channels first."""
        batch, channels, *size = self.image.shape
        stride, kernel, width = self.stride[0], self.weight.shape[-1], size[-1]
        plain = {*self.dilation} == {1} and len({*self.stride}) == 1
        if self.image.dtype != torch.float16 or channels < 32 or not plain:
            return False
        if len(size) != 2 or size[0] == 1:
            return len(size) < 3 and stride == 1
        if len({*self.weight.shape[2:]}) > 1 or kernel not in (1, 3, 5) or width < 7 or stride > 2:
            return False
        if stride == 1 or batch == 1:
            return stride == 1 or kernel > 1 or width <= 28
        if kernel == 1:
            return batch <= 16 and channels >= 128 and width <= 7
        return channels >= 512 or (channels >= 256 and width >= 28)

    @property
    def kind(self) -> tuple[str, ...]:
        """By the columns KIND of the table."""
        size = sum(_flops(self.output, self.weight) >= limit for limit in SIZES)
        kind = "few channels" if self.image.shape[1] < CHANNELS else {1: "1x1", 9: "3x3"}.get(self.taps, "larger")
        if self.groups > 1:
            kind = "grouped" if self.side_by_side else "grouped unevenly"
        if self.depthwise:
            kind = f"depthwise by {'PyTorch' if self.by_pytorch else 'cuDNN'}"
        last = self.image.stride(1) == 1 or self.output.stride(1) == 1
        return self.which, kind, self.key, "last" if last else "first", str(size)

    def seconds(self, kernels: Kernels) -> float:
        """With its launches."""
        table = measured_rows("convolutions", kernels.spec, *KIND)
        which, kind, key, layout, size = self.kind
        types = key, OTHER_HALF.get(key, key)
        found = (table.get((which, kind, of, layout, of_size)) for of in types for of_size in (size, ANY))
        row = next(filter(None, found), None)
        return by_the_rule(kernels, self) * (float(row["factor"]) if row else 1.0)


def forward_seconds(kernels: Kernels, args, tensors, flops, moved, key) -> float:
    """convolution, plain or transposed."""
    image, weight, bias, stride, _, dilation, transposed = args[:7]
    result = tensors[-1]
    groups = args[8] if len(args) > 8 else 1
    one = plain_pass(kernels, "forward", image, result, weight, stride, dilation, transposed, groups, key)
    if bias is None or one.by_pytorch:
        return one.seconds(kernels)
    adding = kernels.spec.kernel + 2 * result.nbytes / kernels.bandwidth["memory"]  # a kernel of its own
    return one.seconds(kernels) + adding


def backward_seconds(kernels: Kernels, args, tensors, flops, moved, key) -> float:
    """convolution_backward: of the image, the weight and the bias, as its mask says."""
    gradient, image, weight, _, stride, _, dilation, transposed, _, groups, mask = args[:11]
    settings = image, gradient, weight, stride, dilation, transposed, groups, key
    wanted = zip(("image", "weight"), mask, strict=False)
    total = sum(plain_pass(kernels, which, *settings).seconds(kernels) for which, asked in wanted if asked)
    if len(mask) > 2 and mask[2]:  # a sum of PyTorch's over all but the channels
        dims = (0, *range(2, gradient.dim()))
        total += reductions.plan(gradient, dims, kernels.spec).seconds(kernels, gradient.nbytes)
    return total


def plain_pass(kernels: Kernels, which, image, output, weight, stride, dilation, transposed, groups, key) -> Pass:
    """As a plain one's. A card before Ampere has no TF32."""
    key = FLOAT32 if key == TF32 and key not in kernels.spec.rates else key
    if transposed:
        image, output, which = output, image, {"forward": "image", "image": "forward"}.get(which, which)
    return Pass(which, image, output, weight, stride, dilation, groups, key)


def by_the_rule(kernels: Kernels, one: Pass) -> float:
    """Before the table: a product of rows, columns and length for each group; the gradient of the image as if forward, which has as many."""
    if one.depthwise:
        return _depthwise(kernels, one)
    spec, which, groups, key = kernels.spec, one.which, one.groups, one.key
    channels_in, channels_out = one.weight.shape[1], one.weight.shape[0] // groups
    tensor_cores = key in spec.rates and key in (TF32, FLOAT16, BFLOAT16) and spec.capability[0] >= 7
    positions, length = one.output.shape[0] * prod(one.output.shape[2:]), channels_in * one.taps
    sizes = positions, channels_out, -(-length // CHANNELS) * CHANNELS if tensor_cores else length
    if which == "weight":
        sizes = length, channels_out, positions
    few_channels = min(one.image.shape[1] if which == "forward" else one.output.shape[1], channels_in) < CHANNELS
    if tensor_cores and groups == 1 and few_channels:
        key, tensor_cores = FLOAT32, False
    longer = DIRECT[which] if key == FLOAT32 or (one.taps == 1 and tensor_cores) else 1.0
    merged = 1
    while tensor_cores and groups % (2 * merged) == 0 and 2 * merged * min(sizes[1], channels_in) <= MERGED:
        merged *= 2
    if merged > 1:
        seconds = kernels.plain(2 * groups * prod(sizes) * merged * longer, one.moved, key)
    else:
        seconds = spec.kernel + kernels.multiplying(groups, *sizes, key, one.moved, fraction=1 / longer)
    square = tuple(one.weight.shape[2:]) == (3, 3) and {*one.stride, *one.dilation, groups} == {1}
    if key == FLOAT32 and square and not kernels.hopper and not kernels.peak:
        ways = WINOGRAD[1:] if which == "weight" else WINOGRAD
        seconds = min(seconds, *(2 * spec.kernel + _by_winograd(kernels, one, *way) for way in ways))
    return seconds + (_converting(kernels, one, key) if tensor_cores else 0.0)


def _by_winograd(kernels: Kernels, one: Pass, square: int, filled: tuple[int, ...], longer: float) -> float:
    """By one of WINOGRAD's ways, without launches."""
    channels_out, channels_in = one.weight.shape[:2]
    sizes = len(one.output), *one.output.shape[2:]
    positions = prod(-(-size // unit) * unit for size, unit in zip(sizes, filled, strict=True))
    rows, length = (
        (channels_in, positions // square**2) if one.which == "weight" else (positions // square**2, channels_in)
    )
    count = (square + 2) ** 2
    took = kernels.multiplying(count, rows, channels_out, length, FLOAT32, one.moved, fraction=1 / longer)
    return took + (1 + count / square**2) * one.moved / kernels.bandwidth["memory"] * (square > 2)


def _converting(kernels: Kernels, one: Pass, key) -> float:
    """Channels first to last, and back: each image is read and written once more, and the weight."""
    ampere = kernels.spec.capability[0] >= 8
    if one.taps == 1 and ({*one.stride} == {1} or not ampere):
        return 0.0
    source, output = one.image, one.output
    if one.which == "image" and output.numel() > source.numel():
        output, source = source, output
    images = [source, output if one.which == "weight" and ampere else one.weight]
    if one.which != "weight" and key != TF32 and ampere:
        images.append(output)
    return sum(kernels.reordering(image) for image in images if image.stride(1) != 1 and image.shape[1] > 1)


def _depthwise(kernels: Kernels, one: Pass) -> float:
    """By PyTorch's kernels or by cuDNN's."""
    spec, taps = kernels.spec, one.taps
    output, source = (one.image, one.output) if one.which == "image" else (one.output, one.image)
    if one.by_pytorch:
        number, tap = CYCLES[kernels.generation]
        busy = max(one.moved / kernels.bandwidth["memory"], output.numel() * (number + tap * taps) / kernels.cycles)
        return spec.kernel + GRADIENT[one.which][1] * busy
    moving = one.moved / (spec.bandwidth * BANDWIDTH)
    if output.dtype == torch.float32 and taps >= LARGE:
        numbers = min(output.numel(), source.numel())  # the smaller one's meet each weight once
        return spec.kernel + max(moving, SINGLE[one.which] * numbers * taps / kernels.cycles)
    return spec.kernel + GRADIENT[one.which][0] * max(moving, 2 * output.numel() * taps / (spec.rates[FLOAT32] * FLOPS))
