"""Elementwise kernels that do not read 16 bytes at once: cycles of a multiprocessor that they take.

Where all tensors are alike, `vectorized_elementwise_kernel` runs and memory holds it up. Where one is broadcast or lies otherwise, a
thread of `elementwise_kernel` works out the place of each number in each tensor by divisions, for 4 numbers of 16 bits or 2 of 32; where
types differ, `unrolled_elementwise_kernel` converts number by number (aten/src/ATen/native/cuda/CUDALoops.cuh: gpu_kernel_impl_nocast,
gpu_kernel_impl).
"""

import functools
from math import prod
from typing import NamedTuple

import torch

# Cycles for each number that is written, by its bytes, where two tensors take part and lie in two stretches of even steps; what each tensor
# beside them takes, and each dimension more (tests/gpu/h100_profiled.csv: slices, windows and heads that are copied, one image or none read
# beside a gate; h100_kernels.csv: a row or column broadcast, 0.6 to 0.71 and 0.85 to 0.96). Liger-Kernel's rotary embedding in bfloat16 on
# an A100-80GB takes as long (BSD 2-Clause, 2024; twice its bytes); its RMS norm in float32 showed no such thing
WRITTEN, BESIDE, DIMENSION = {2: 0.475, 4: 0.64}, {2: 0.175, 4: 0.25}, {2: 0.105, 4: 0.05}
# On top where neighbours of the result lie apart in what is read: a warp's load asks for 32 pieces of SECTOR bytes, of which a block uses
# what its rows have beside each other (tests/gpu/h100_profiled.csv, copies to channels last of 64 to 256 channels: 1.2 to 2 cycles in
# all; a transposed matrix 2.1 in 32 bits and 1.9 in 16, tests/gpu/h100_kernels.csv)
APART, PIECE, SECTOR, BLOCK = 0.46, 0.9, 32, 128
# What memory gives where what is read lies in rows with gaps between (float32, 67 MB: 2.2 to 2.35 TB/s), and cycles on top where 16 bits become 32
GAPS, WIDENED = 1.25, 0.15
# Bytes that a multiprocessor moves in a cycle where types differ: Liger-Kernel's RMS norm on an A100-80GB, bfloat16 with float32 between,
# 1.34 times its bytes, which leaves 1.7 for its three kernels that convert
CONVERTED = 6.9


def converts(tensors) -> bool:
    """Does it read or write 16 bits beside 32? What makes 16 bits of 32 reads 16 bytes at once (vectorized_elementwise_kernel, H100)."""
    halves = single = False
    for tensor in tensors:
        if tensor.dim():
            halves |= tensor.itemsize == 2
            single |= tensor.itemsize == 4 and tensor.is_floating_point()
    return halves and single and not (len(tensors) == 2 and tensors[-1].itemsize == 2)


class Places(NamedTuple):
    """Of a kernel that works out places: its cycles in all, and how many times its bytes memory is held up for."""

    cycles: float
    traffic: float


def one_by_one(tensors) -> Places | None:
    """None for any other kernel. tensors: what it reads, and last what it writes."""
    made = tensors[-1]
    if made.layout is not torch.strided or not made.dim() or made.itemsize not in WRITTEN:
        return None
    read = []
    for tensor in tensors[:-1]:
        if tensor.layout is not torch.strided:
            return None
        if tensor.dim():
            read.append((tuple(tensor.shape), tensor.stride()))
    own = tuple(made.shape), made.stride()
    if all(layout == own for layout in read):
        return None
    return _places(own, tuple(read), made.itemsize)


def to_close(tensor) -> Places | None:
    """Of a copy whose numbers lie close, in the order of its dimensions."""
    if tensor.itemsize not in WRITTEN:
        return None
    shape = tuple(tensor.shape)
    return _places((shape, close(shape)), ((shape, tensor.stride()),), tensor.itemsize)


def chosen(args, tensors) -> float:
    """Cycles of where(condition, x, y) with one number for x or y, which lies on the GPU and is broadcast; a byte of the condition costs
    nothing beside (tests/gpu/h100_profiled.csv, masks of attention: 0.5 and 0.6)."""
    made = tensors[-1]
    if not made.dim() or made.itemsize not in WRITTEN or (len(tensors) > 3 and all(tensor.dim() for tensor in tensors)):
        return 0.0
    whole = sum(1 for tensor in tensors[1:-1] if tensor.dim() and is_whole(tensor, made))
    return made.numel() * (WRITTEN[made.itemsize] + BESIDE[made.itemsize] * whole)


def is_whole(tensor, made) -> bool:
    """Is each of its numbers read once, for one of the result?"""
    return tensor.numel() == made.numel() and 0 not in tensor.stride()


def close(shape) -> tuple[int, ...]:
    """Strides of such a tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@functools.lru_cache(4096)
def _places(made, read, size: int) -> Places:
    """Of a result and of what is read, (shape, strides) each."""
    shape, strides = made
    numbers = prod(shape)
    expanded = [_expanded(shape, *layout) for layout in read]
    others = [layout for layout in read if layout != made and prod(layout[0]) == numbers and 0 not in layout[1]]
    apart = any(_innermost(*layout) != _innermost(shape, strides) for layout in others)
    each = WRITTEN[size] + BESIDE[size] * (len(read) - 1)
    each += DIMENSION[size] * max(0, _stretches(shape, [strides, *expanded]) - 2)
    if apart:
        each += APART + PIECE * _pieces(shape, strides, size)
    return Places(numbers * each, GAPS if others else 1.0)


def _expanded(shape, own, strides) -> tuple[int, ...]:
    """Of an operand, for the dimensions of the result: 0 along those that it has not."""
    missing = len(shape) - len(own)
    return (0,) * missing + tuple(0 if size == 1 else step for size, step in zip(own, strides, strict=True))


def _stretches(shape, layouts) -> int:
    """Dimensions that are left where neighbours that follow each other in every tensor are one (TensorIterator's coalescing)."""
    order = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: layouts[0][dim])
    left = 0
    for at, dim in enumerate(order):
        before = order[at - 1] if at else None
        if before is None or any(layout[dim] != layout[before] * shape[before] for layout in layouts):
            left += 1
    return left


def _pieces(shape, strides, size: int) -> float:
    """Of memory that a block reads, for each number: neighbours along the result's rows lie apart, and those below are beside them."""
    at = _innermost(shape, strides)
    along = shape[at] if at is not None else 1
    below = max(1.0, BLOCK * (4 if size == 2 else 2) / along)
    return 1 / min(SECTOR / size, below)


def _innermost(shape, strides) -> int | None:
    """The dimension along which memory runs."""
    return next((dim for dim in reversed(range(len(shape))) if strides[dim] == 1 and shape[dim] > 1), None)
