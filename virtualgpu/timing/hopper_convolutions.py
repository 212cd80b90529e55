"""Convolutions on a Hopper, in 16 bits or TF32: which rule says how long one takes, 1x1's, a first layer's or a grouped one's."""

from collections.abc import Sequence
from math import prod

import torch

from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT16, TF32
from virtualgpu.timing import hopper_first_layers, hopper_grouped, hopper_pointwise
from virtualgpu.timing.kernels import Kernels

HOPPER = 9  # of compute capability
DIMENSIONS = (3, 4)  # of an image [batch, channels, *size]


def seconds(
    kernels: Kernels,
    which: str,
    image: torch.Tensor,
    made: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    groups: int,
    key: str,
) -> float | None:
    """`which`: forward, or the gradient of the "image" or of the "weight"; with what is `made` of the image, or its gradient. None: by no rule
    of these."""
    spec = kernels.spec
    if spec.capability[0] != HOPPER or kernels.peak or key not in (FLOAT16, BFLOAT16, TF32) or key not in spec.rates:
        return None
    if image.dim() not in DIMENSIONS or not image.numel() or not made.numel():
        return None
    images, read, channels = image.shape[0], image.shape[1], made.shape[1]
    places, places_made, kernel = prod(image.shape[2:]), prod(made.shape[2:]), prod(weight.shape[2:])
    last = image.stride(1) == 1 or made.stride(1) == 1
    if groups > 1:
        of = hopper_grouped.Grouped(which, images, read, channels, places, places_made, kernel, groups, last, key)
        return hopper_grouped.seconds(kernels, of)
    if read < hopper_first_layers.FEWER:
        apart = all(size == step for size, step in zip(weight.shape[2:], stride, strict=False))
        layer = hopper_first_layers.FirstLayer(
            which, images, read, channels, places, places_made, kernel, apart, last, key
        )
        return None if which == "image" else hopper_first_layers.seconds(kernels, layer)
    if kernel > 1:
        return None
    pointwise = hopper_pointwise.Pointwise(
        which, images, read, channels, places, places_made, last, key, image.itemsize
    )
    return hopper_pointwise.seconds(kernels, pointwise)
