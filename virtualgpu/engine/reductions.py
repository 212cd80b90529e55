"""What CUDA's reductions (sum, mean, max, var, any and their kind) take of the GPU's memory while they run.

Where each output has many inputs and there are few outputs, several blocks of threads share an output: each leaves its part in a buffer,
and a counter (semaphore) for each tells who is the last and adds up the parts. The gradient of a bias, a sum over the rows of [2048, 4096]
numbers, takes 64 MiB so. timing/reductions.py says how the work is split; its bytes are those of an H100, PyTorch 2.11, measured 2026-11-26.
"""

import torch

from virtualgpu.engine.halves import HALVES
from virtualgpu.timing import reductions
from virtualgpu.timing.reductions import BY_TYPE, MANY, NORMS, SUMS

PAIR = 16  # bytes of a value and its index, or of mean, squares and count (WelfordData)


def held(name: str, args, kwargs, out, gpu) -> list[int]:
    """Bytes of each block that the reduction called `name` takes and gives back."""
    source = args[0]
    result = out[0] if isinstance(out, tuple) else out
    if len(args) > 1 and isinstance(args[1], torch.Tensor):  # max of two tensors
        return []
    if not source.numel() or not result.numel() or source.layout is not torch.strided:
        return []
    copies = name in SUMS and result.dtype is not source.dtype
    if source.numel() < MANY and not copies:
        return []
    dims = reductions.dims_of(args[2:] if name in NORMS else args[1:], source.dim())
    copy, dtype = [], source.dtype
    if copies and not (dtype in HALVES and result.dtype is torch.float32):
        dtype = result.dtype
        copy = [source.numel() * dtype.itemsize]
    return copy + split(source, dims, _entry(name, dtype, isinstance(out, tuple)), gpu.spec)


def over_all(tensor: torch.Tensor, spec) -> list[int]:
    """The same of a sum or mean of all numbers."""
    return split(tensor, range(tensor.dim()), max(4, tensor.itemsize), spec)


def split(source: torch.Tensor, dims, entry: int, spec) -> list[int]:
    """[bytes of the buffer, of its counters] for a reduction of `source` over `dims`, whose parts have `entry` bytes; [] without any."""
    if source.numel() < MANY:
        return []
    plan = reductions.plan(source, dims, spec)
    if plan.blocks <= 1:
        return []
    return [entry * plan.outputs * plan.blocks * (1 if plan.along else plan.across * plan.vector), 4 * plan.grid]


def _entry(name: str, dtype: torch.dtype, several: bool) -> int:
    """Bytes of one part of a result."""
    if name == "aminmax":
        return 2 * dtype.itemsize
    if name in ("argmax", "argmin") or (name in ("max", "min") and several):
        return PAIR
    if name in ("var", "std", "var_mean", "std_mean"):
        return 2 * PAIR if dtype is torch.float64 else PAIR
    return dtype.itemsize if name in BY_TYPE else max(4, dtype.itemsize)
