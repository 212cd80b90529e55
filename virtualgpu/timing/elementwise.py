"""Elementwise kernels that do not read 16 bytes at once: cycles of a multiprocessor that they take.

Where all tensors are alike, `vectorized_elementwise_kernel` runs and memory holds it up. Where one is broadcast or lies otherwise, a
thread of `elementwise_kernel` works out the place of each number in each tensor by divisions, for 4 numbers of 16 bits or 2 of 32; where
types differ, `unrolled_elementwise_kernel` converts number by number (aten/src/ATen/native/cuda/CUDALoops.cuh: gpu_kernel_impl_nocast,
gpu_kernel_impl).
"""

import torch

# Cycles for each number that is written, by its bytes, and for each that is read beside (an expanded operand is not: its few numbers stay
# in the first-level cache): tests/gpu/h100_profiled.csv, 0.45 to 0.49 and 0.62 to 0.64 where nothing is read, 0.6 to 0.75 and 0.75 to
# 0.92 with one image; h100_kernels.csv, a row or column broadcast: 0.6 to 0.71 and 0.85 to 0.96. So does Liger-Kernel's rotary
# embedding in bfloat16 on an A100-80GB (BSD 2-Clause, 2024; twice its bytes); its RMS norm in float32 showed no such thing
WRITTEN, READ = {2: 0.45, 4: 0.62}, 0.25
# On top where neighbours of the result lie apart in what is read: a warp's load asks for 32 pieces of SECTOR bytes, of which a block uses
# what its rows have beside each other (tests/gpu/h100_profiled.csv, copies to channels last of 64 to 256 channels: 1.2 to 2 cycles in
# all; a transposed matrix 2.1 in 32 bits and 1.9 in 16, tests/gpu/h100_kernels.csv)
APART, PIECE, SECTOR, BLOCK = 0.34, 0.9, 32, 128
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


def one_by_one(tensors) -> float:
    """Cycles in all, of a kernel that works out places; 0 for any other. tensors: what it reads, and last what it writes."""
    made = tensors[-1]
    if made.layout is not torch.strided or not made.dim():
        return 0.0
    numbers, stride, size = made.numel(), made.stride(), made.itemsize
    if size not in WRITTEN:
        return 0.0
    alike, read, apart = True, 0, False
    for tensor in tensors[:-1]:
        if not tensor.dim():
            continue
        if tensor.layout is not torch.strided:
            return 0.0
        if tensor.numel() == numbers and tensor.stride() == stride:
            read += 1
            continue
        alike = False
        if is_whole(tensor, made):
            read += 1
            apart |= _innermost(tensor) != _innermost(made)
    if alike:
        return 0.0
    return numbers * (WRITTEN[size] + READ * read + (APART + PIECE * _pieces(made) if apart else 0.0))


def chosen(args, tensors) -> float:
    """Cycles of where(condition, x, y) with one number for x or y, which lies on the GPU and is broadcast; a byte of the condition costs
    nothing beside (tests/gpu/h100_profiled.csv, masks of attention: 0.5 and 0.6)."""
    made = tensors[-1]
    if not made.dim() or made.itemsize not in WRITTEN or (len(tensors) > 3 and all(tensor.dim() for tensor in tensors)):
        return 0.0
    whole = sum(1 for tensor in tensors[1:-1] if tensor.dim() and is_whole(tensor, made))
    return made.numel() * (WRITTEN[made.itemsize] + READ * whole)


def is_whole(tensor, made) -> bool:
    """Is each of its numbers read once, for one of the result?"""
    return tensor.numel() == made.numel() and 0 not in tensor.stride()


def _pieces(made) -> float:
    """Of memory that a block reads, for each number: neighbours along the result's rows lie apart, and those below are beside them."""
    at = _innermost(made)
    along = made.size(at) if at is not None else 1
    below = max(1.0, BLOCK * (4 if made.itemsize == 2 else 2) / along)
    return 1 / min(SECTOR / made.itemsize, below)


def _innermost(tensor) -> int | None:
    """The dimension along which memory runs."""
    return next(
        (dim for dim in reversed(range(tensor.dim())) if tensor.stride(dim) == 1 and tensor.size(dim) > 1), None
    )
