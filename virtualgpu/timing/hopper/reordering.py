"""Kernels that bring images and weights from channels first to last, or back (nchwToNhwcKernel, nhwcToNchwKernel), in all convolutions on a Hopper."""

from math import ceil, prod

from torch import Tensor

from virtualgpu.timing.kernels import Kernels

# Cycles: beginning and end, a block of 32 places of 32 channels (a weight's 9 places are one, too), in 16 bits and in 32; and what those in 16 bits
# take over others from memory. 97 % of such kernels on an H100 (tests/gpu/h100_convolutions.csv) are within 15 %
START, BLOCK, HALVES, SINGLE, HALVES_FROM_MEMORY = 2800, 32, 385, 450, 1.5


def is_first(tensor: Tensor) -> bool:
    """Are its channels before the places, and not last?"""
    return tensor.shape[1] > 1 and tensor.stride(1) != 1


def seconds(kernels: Kernels, tensor: Tensor) -> float:
    """One that reads [batch, channels, *size] and writes it in the other order."""
    blocks = tensor.shape[0] * ceil(tensor.shape[1] / BLOCK) * ceil(prod(tensor.shape[2:]) / BLOCK)
    return _of_blocks(kernels, blocks, tensor.nbytes, tensor.itemsize)


def of_numbers(kernels: Kernels, numbers: float, size: int) -> float:
    """The same for so many, of `size` bytes, in whole blocks."""
    return _of_blocks(kernels, numbers / BLOCK**2, size * numbers, size)


def _of_blocks(kernels: Kernels, blocks: float, nbytes: float, size: int) -> float:
    halves = size == 2
    computing = blocks * (HALVES if halves else SINGLE) / kernels.cycles
    moving = kernels.streaming(2 * nbytes) * (HALVES_FROM_MEMORY if halves else 1.0)
    return kernels.took(START) + max(computing, moving)
