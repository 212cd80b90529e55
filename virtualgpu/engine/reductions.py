"""What CUDA's reductions (sum, mean, max, var, any and their kind) take of the GPU's memory while they run.

Where each output has many inputs and there are few outputs, several blocks of threads share an output: each leaves its part in a buffer,
and a counter (semaphore) for each tells who is the last and adds up the parts. The gradient of a bias, a sum over the rows of [2048, 4096]
numbers, takes 64 MiB so. aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig) says how the work is split; its bytes are
those of an H100, PyTorch 2.11, measured 2026-11-26.
"""

import functools

import torch

from virtualgpu.engine.halves import HALVES
from virtualgpu.hardware.capabilities import CAPABILITIES

WARP, BLOCK = 32, 512  # threads; MAX_NUM_THREADS of all types but complex128
FEW, MANY = 16, 256  # inputs for each thread: min_values_per_thread, max_values_per_thread
PAIR = 16  # bytes of a value and its index, or of mean, squares and count (WelfordData)
SUMS = {"sum", "nansum", "prod"}  # whole numbers are copied as int64 first
BY_TYPE = {"amax", "amin", "any", "all", "max", "min"}
EXTREMES = {"max", "min", "argmax", "argmin", "aminmax", "var", "std", "var_mean", "std_mean"}
NORMS = {"norm", "linalg_vector_norm"}  # whose second argument is an exponent
NAMES = SUMS | BY_TYPE | EXTREMES | NORMS | {"mean"}


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
    dims = _dims(args[2:] if name in NORMS else args[1:], source.dim())
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
    threads = CAPABILITIES[spec.capability].threads
    return _split(
        source.shape, source.stride(), source.storage_offset() % 4, tuple(dims), entry, spec.processors, threads
    )


@functools.lru_cache(4096)
def _split(shape, strides, offset: int, dims, entry: int, processors: int, threads: int) -> list[int]:
    reduced, kept = _coalesced(shape, strides, dims)
    inputs, outputs = _product(reduced), _product(kept)
    fastest = not kept or not reduced or reduced[0][1] < kept[0][1]
    width, height, vector = inputs if fastest else outputs, outputs if fastest else inputs, 1
    if fastest:
        if not kept and len(reduced) == 1 and reduced[0][1] == 1 and width >= 128:
            width //= 4
    elif kept[0][1] == 1:
        vector = 4
        others = [stride for _, stride in (*reduced, *kept[1:])]
        for number in (offset, kept[0][0], *others):
            while number % vector:
                vector //= 2
        width //= vector
    most = BLOCK // vector
    width, height = _power(width, most), _power(height, most)
    across = min(width, WARP)
    down = min(height, most // across)
    across = min(width, most // down)
    step_in, step_out = (across, 1) if fastest else (1, across)
    each = -(-inputs // step_in)
    if each < down * FEW and each < MANY:
        return []
    step_in *= down
    each = -(-inputs // step_in)
    grid = -(-(outputs // vector) // step_out)
    target = processors * (threads // (across * down))
    if each < MANY or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-each // FEW)), -(-each // MANY))
    if blocks <= 1:
        return []
    return [entry * outputs * blocks * (1 if fastest else across * vector), 4 * grid]


def _entry(name: str, dtype: torch.dtype, several: bool) -> int:
    """Bytes of one part of a result."""
    if name == "aminmax":
        return 2 * dtype.itemsize
    if name in ("argmax", "argmin") or (name in ("max", "min") and several):
        return PAIR
    if name in ("var", "std", "var_mean", "std_mean"):
        return 2 * PAIR if dtype is torch.float64 else PAIR
    return dtype.itemsize if name in BY_TYPE else max(4, dtype.itemsize)


def _dims(args, count: int):
    """The dimensions that are reduced: the first argument that names some; all without one."""
    for value in args:
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            return [value % count] if count else []
        if isinstance(value, (list, tuple)) and value:
            return [dim % count for dim in value] if count else []
    return range(count)


def _coalesced(shape, strides, dims) -> tuple[list, list]:
    """(reduced, kept): [(size, stride)], the innermost first, neighbours that lie close as one. As TensorIterator has them."""
    groups: tuple[list, list] = ([], [])
    entries = [(dim, size, stride) for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1]
    entries.sort(key=lambda entry: (entry[2] if entry[0] in dims else 0, -entry[0]))
    for dim, size, stride in entries:
        group = groups[dim not in dims]
        if group and group[-1][0] * group[-1][1] == stride:
            group[-1] = group[-1][0] * size, group[-1][1]
        else:
            group.append((size, stride))
    return groups


def _product(dims: list) -> int:
    out = 1
    for size, _ in dims:
        out *= size
    return out


def _power(number: int, most: int) -> int:
    """The largest power of two that is no larger than either."""
    return most if number >= most else 1 << max(number, 1).bit_length() - 1
