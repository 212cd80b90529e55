"""A convolution, as the rules for a Hopper's kernels ask for it."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch


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
    def last(self) -> bool:
        """Are its channels last, not first?"""
        return self.image.stride(1) == 1 or self.made.stride(1) == 1

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Images, channels of the image and of what is made, and their places."""
        image, made = self.image, self.made
        return image.shape[0], image.shape[1], made.shape[1], prod(image.shape[2:]), prod(made.shape[2:])

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
