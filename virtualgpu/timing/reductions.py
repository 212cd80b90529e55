"""How CUDA's reductions (sum, mean, max, var, any and their kind) are split into blocks of threads, and how long these take.

Where each output has many inputs and there are few outputs, several blocks share an output: each leaves its part in a buffer, and a counter
for each tells who is the last and adds up the parts. aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig); PyTorch 2.11.
"""

import functools
import operator
from math import ceil, gcd, prod
from typing import NamedTuple

import torch

WARP, BLOCK = 32, 512  # threads; MAX_NUM_THREADS of all types but complex128
FEW, MANY = 16, 256  # inputs for each thread: min_values_per_thread, max_values_per_thread
LOADS = 4  # that a thread has on their way at once: vt0
SUMS = {"sum", "nansum", "prod"}  # whole numbers are copied as int64 first
BY_TYPE = {"amax", "amin", "any", "all", "max", "min"}
NORMS = {"norm", "linalg_vector_norm"}  # whose second argument is an exponent
NAMES = SUMS | BY_TYPE | NORMS | {"mean", "argmax", "argmin", "aminmax", "var", "std", "var_mean", "std_mean"}
# Cycles, of an H100 (tests/gpu/h100_profiled.csv): from one round of loads to the next, also where places are reckoned by division, as those of
# an image's channel over all images are; of a multiprocessor for each such number, and for each thread, which is started and, where neighbours
# share an output, tells them its part; where blocks share outputs, the last one's beginning, and each part that a thread of it reads
ROUND, DIVIDED_ROUND, DIVIDED, THREAD, TELLING, SHARED, PART = 430, 1130, 0.45, 0.8, 1.0, 3700, 500
NBYTES = operator.attrgetter("nbytes")
COUNTERS = 0.4  # of a kernel's time, what setting the counters to zero takes (0.7 to 0.8 us)


class Plan(NamedTuple):
    """across, down: threads of a block. vector: neighbouring outputs that a thread has at once. along: do neighbouring threads have inputs of
    one output? grid: blocks for all outputs, blocks: for each. each: inputs of a thread. divided: inputs whose places are reckoned by division."""

    outputs: int
    across: int
    down: int
    vector: int
    along: bool
    grid: int
    blocks: int
    each: int
    divided: int

    def seconds(self, kernels, nbytes: float) -> float:
        """On that card, of so many bytes."""
        spec, threads, blocks = kernels.spec, self.across * self.down, self.grid * self.blocks
        waves = ceil(blocks / (spec.processors * max(1, kernels.threads // threads)))
        waiting = waves * ceil(self.each / LOADS) * (DIVIDED_ROUND if self.divided else ROUND)
        working = max((THREAD + TELLING * self.along) * threads * blocks, DIVIDED * self.divided)
        seconds = spec.kernel + max(kernels.took(waiting), kernels.working(nbytes, working))
        if self.blocks > 1:
            parts = ceil(self.blocks / (threads if self.along else self.down))
            seconds += COUNTERS * spec.kernel + kernels.took(SHARED + parts * PART)
        return seconds


def reduction(kernels, args, tensors, dims_at: int = 1) -> float:
    """Seconds of a reduction; dims_at: from which argument on its dimensions are named."""
    source, nbytes = args[0], sum(map(NBYTES, tensors))
    two = len(args) > 1 and isinstance(args[1], torch.Tensor)  # max of two tensors
    if source.layout is not torch.strided or two:
        return kernels.spec.kernel + kernels.streaming(nbytes)
    nbytes -= max(0, source.nbytes - source.untyped_storage().nbytes())  # of an expanded tensor
    return plan(source, dims_of(args[dims_at:], source.dim()), kernels.spec).seconds(kernels, nbytes)


norm = functools.partial(reduction, dims_at=2)  # whose second argument is its exponent


def plan(source: torch.Tensor, dims, spec) -> Plan:
    """Of a reduction of `source` over `dims`."""
    layout = source.shape, source.stride(), source.storage_offset() % 4
    return _plan(*layout, tuple(dims), spec.processors, spec.limits.threads)


@functools.lru_cache(4096)
def _plan(shape, strides, offset: int, dims, processors: int, threads: int) -> Plan:
    reduced, remaining = _coalesced(shape, strides, dims)
    inputs, outputs = (prod(size for size, _ in group) for group in (reduced, remaining))
    along = not remaining or (bool(reduced) and reduced[0][1] < remaining[0][1])
    width, height, vector = inputs if along else outputs, outputs if along else inputs, 1
    if along and not remaining and len(reduced) == 1 and reduced[0][1] == 1 and width >= 128:
        width //= 4
    elif not along and remaining[0][1] == 1:
        vector = gcd(4, offset, remaining[0][0], *(stride for _, stride in (*reduced, *remaining[1:])))
        width //= vector
    most = BLOCK // vector
    width, height = (min(most, 1 << max(size, 1).bit_length() - 1) for size in (width, height))  # powers of two
    down = min(height, most // min(width, WARP))
    across = min(width, most // down)
    step_in, step_out = (across, 1) if along else (1, across)
    each = ceil(inputs / step_in)
    sharing = each >= min(down * FEW, MANY)  # do the block's warps share an output?
    if sharing:
        step_in *= down
        each = ceil(inputs / step_in)
    else:
        step_out *= down
    grid = ceil(outputs // vector / step_out)
    target = processors * (threads // (across * down))
    blocks = 1
    if sharing and each >= MANY and grid <= target:
        blocks = max(min(ceil(target / grid), ceil(each / FEW)), ceil(each / MANY))
        each = ceil(inputs / (step_in * blocks))
    divided = inputs * outputs if along and len(reduced) > 1 else 0
    return Plan(outputs, across, down, vector, along, grid, blocks, each, divided)


def dims_of(args, count: int):
    """The dimensions that are reduced: the first argument that names some; all without one."""
    for value in args:
        named = [value] if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(named, (list, tuple)) and named:
            return [dim % count for dim in named] if count else []
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
