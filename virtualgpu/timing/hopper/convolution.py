"""A convolution, as the rules for a Hopper's kernels ask for it."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from virtualgpu.hardware.datasheet import TF32


class Sizes(NamedTuple):
    """Of one, for rules that ask for no more: `images` of `read` channels and `places` each, made into as many of `made` channels and `places_made`.

    kernel: places of it. apart: no number is read twice. last: its channels are last, not first."""

    way: str
    images: int
    read: int
    made: int
    places: int
    places_made: int
    kernel: int
    groups: int
    apart: bool
    last: bool
    key: str

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return 4 if self.key == TF32 else 2


class Convolution(NamedTuple):
    """way: "forward" reads `image` and makes `made`, "image" is the gradient of what it read, "weight" that of its weight.

    A transposed convolution is an "image", and the gradient of what it read a "forward". image, made: [batch, channels, *size]; weight: [made
    channels, channels read / groups, *size]. key: into Spec.rates.
    """

    way: str
    image: torch.Tensor
    made: torch.Tensor
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
    def sizes(self) -> Sizes:
        """As numbers."""
        image, made, weight = self.image, self.made, self.weight
        counts = image.shape[0], image.shape[1], made.shape[1], prod(image.shape[2:]), prod(made.shape[2:])
        apart = all(size == step for size, step in zip(weight.shape[2:], self.stride, strict=False))
        last = image.stride(1) == 1 or made.stride(1) == 1
        return Sizes(self.way, *counts, self.taps, self.groups, apart, last, self.key)

    def each(self, steps: Sequence[int]) -> Sequence[int]:
        """One of each dimension, where one may stand for all."""
        dimensions = self.weight.dim() - 2
        return steps if len(steps) == dimensions else [steps[0]] * dimensions

    @property
    def reach(self) -> int:
        """Places from the first to the last that meet one, at most."""
        return max(
            (size - 1) * step for size, step in zip(self.weight.shape[2:], self.each(self.dilation), strict=True)
        )
