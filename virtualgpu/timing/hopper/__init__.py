"""Convolutions on a Hopper (H100, H200): which of cuDNN's and cuBLAS's kernels they take, and how long.

What kernels there are, and their tiles, is from their names in traces of 6,705 convolutions on an H100 (cuDNN 9.19, PyTorch 2.11: tests/gpu/
h100_convolutions.csv); those of three dimensions, which nothing was fitted to, go by the same rules.
Of 3,426 on an H200, from which nothing is, 81 % are within 30 % (`python -m tests.virtualgpu.timing.test_profiled_kernels H200`).

images          what makes an image: forward, or the gradient of what was read, of kernels larger than 1x1
weights         the gradient of the weight of such
pointwise       1x1: products of matrices
first_layers    fewer than 8 channels read: filled up, or left to other cores
grouped         groups of several channels, done side by side
single          single precision without TF32, without groups
reordering      what brings images from channels first to last, and back
convolution     what all of these are asked about
"""

from collections.abc import Callable

from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT16, FLOAT32, TF32
from virtualgpu.timing.hopper import first_layers, grouped, images, pointwise, single, weights
from virtualgpu.timing.hopper.convolution import Convolution
from virtualgpu.timing.kernels import Kernels

DIMENSIONS = (3, 4, 5)  # of an image [batch, channels, *size]
CHANNELS = 8  # with fewer, images are filled up


def seconds(kernels: Kernels, convolution: Convolution) -> float | None:
    """With its launches. None: there is no rule for it here."""
    if not kernels.hopper or kernels.peak:
        return None
    rule = _rule(convolution)
    return None if rule is None else rule(kernels, convolution)


def _rule(convolution: Convolution) -> Callable[[Kernels, Convolution], float] | None:
    way, image, made, weight, *_, key = convolution
    if image.dim() not in DIMENSIONS or not image.numel() or not made.numel():
        return None
    if key == FLOAT32:
        return single.seconds if weight.itemsize == 4 and convolution.groups == 1 else None
    if key not in (FLOAT16, BFLOAT16, TF32):
        return None
    if convolution.groups > 1:
        return grouped.seconds
    if image.shape[1] < CHANNELS:
        return images.seconds if way == "image" else first_layers.seconds
    if convolution.taps == 1:
        return pointwise.seconds
    if made.shape[1] < CHANNELS:
        return None
    if way != "weight":
        return images.seconds
    return weights.seconds if weight.dim() >= 4 else None
