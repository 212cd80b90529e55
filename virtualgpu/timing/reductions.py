"""Kernels that add up: CUDA's reductions (sum, mean, max, var, any and their kind) and norms, by the blocks of threads that they are cut into.

**Reductions.** Where each output has many inputs and there are few outputs, several blocks share an output: each leaves its part in a buffer, and a
counter for each tells who is the last and adds up the parts. aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig); PyTorch 2.11.

**Batch norm.** Channels first, one block of 512 threads has a whole channel: few channels leave most of a large GPU idle, and very many of few
numbers take a block's fixed time each (aten/src/ATen/native/cuda/Normalization.cuh; cuDNN's bn_fw_tr_1C11_* and bn_bw_1C11_* have the same
blocks). Channels last, an image is cut into tiles of 32 channels (the same file, flexible_launch_configs; cuDNN's batchnorm_*_nhwc_semiPersist).
PyTorch takes its own kernels for weights in 16 bits and for bfloat16 (Normalization.cpp), cuDNN's for all else. **Layer norm** has a block for
each row (layer_norm_kernel.cu). Constants are cycles of a multiprocessor, of an H100 (tests/gpu/h100_profiled.csv; PyTorch 2.11, cuDNN 9.19).
"""

import operator
from functools import lru_cache, partial
from math import ceil, gcd, prod
from typing import NamedTuple

import torch

from virtualgpu.timing.kernels import Kernels

# -- Reductions

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

    def seconds(self, kernels: Kernels, nbytes: float) -> float:
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


def reduction(kernels: Kernels, args, tensors, dims_at: int = 1) -> float:
    """Seconds of a reduction; dims_at: from which argument on its dimensions are named."""
    source, nbytes = args[0], sum(map(NBYTES, tensors))
    two = len(args) > 1 and isinstance(args[1], torch.Tensor)  # max of two tensors
    if source.layout is not torch.strided or two:
        return kernels.spec.kernel + kernels.streaming(nbytes)
    nbytes -= max(0, source.nbytes - source.untyped_storage().nbytes())  # of an expanded tensor
    return plan(source, dims_of(args[dims_at:], source.dim()), kernels.spec).seconds(kernels, nbytes)


norm = partial(reduction, dims_at=2)  # whose second argument is its exponent


def plan(source: torch.Tensor, dims, spec) -> Plan:
    """Of a reduction of `source` over `dims`."""
    layout = source.shape, source.stride(), source.storage_offset() % 4
    return _plan(*layout, tuple(dims), spec.processors, spec.limits.threads)


@lru_cache(4096)
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


# -- Norms

THREADS, EVALUATING = 512, 0.62  # of a block; a number of any batch norm that evaluates
# Threads beside each other by an image's places, of 512: getNumThreads, and as the names of cuDNN's kernels say
WIDTHS, CUDNN_WIDTHS = {positions: positions for positions in (32, 64, 128, 256)}, {1023: 32, 4095: 128}


class Loop(NamedTuple):
    """What a block of 512 threads does with a channel or a tile, in cycles. fixed: before and after its steps, in one of which each
    thread has one number. latency: of a step, at least; through: for each block of a multiprocessor, whose others wait meanwhile; lost:
    on top, where numbers come from memory instead of the second-level cache."""

    fixed: float
    latency: float
    through: float
    lost: float

    def seconds(self, kernels: Kernels, blocks: int, steps: float, nbytes: float, moved: float) -> float:
        """Wave after wave of as many blocks as fit, or as long as memory moves so much. nbytes: that pass the cache meanwhile."""
        processors, fit = kernels.spec.processors, max(1, kernels.spec.limits.threads // THREADS)
        step = max(self.latency, self.through * min(fit, ceil(blocks / processors))) + self.lost * kernels.lost(nbytes)
        cycles = ceil(blocks / (processors * fit)) * (self.fixed + steps * step)
        return max(kernels.took(cycles), kernels.streaming(moved))


# PyTorch's own. Statistics took 0.59 us a step on a V100 (NVIDIA's PyProf, 64 x 64 x 112 x 112) and 0.40 us on an H20 (FlagGems #5754),
# which both read from memory; backward 0.72 us on an H20 (#4086)
STATISTICS, BACKWARD = Loop(4600, 500, 208, 350), Loop(1800, 1330, 560, 430)
# cuDNN's, in steps of four (UNROLLED). Others: forward 0.27 us on an H100, 0.35 on its PCIe card, 0.36 on a B200 and 0.65 on an A100
# (KernelBench, BatchNorm), backward 0.69 us on an H20 (FlagGems #4250)
CUDNN, CUDNN_BACKWARD, UNROLLED = Loop(1000, 450, 475, 180), Loop(1000, 870, 900, 650), 4
# and where a block keeps a channel's numbers and reads them once, by the bytes of one (*_singleread), and how much longer a step takes where
# an image has an odd number of places, so that two numbers never lie in one load. Fitted to 58 single kernels of an H100
KEPT = {4: Loop(8800, 0, 230, 830), 2: Loop(6100, 0, 140, 655)}
KEPT_BACKWARD, ODD = {4: Loop(7800, 0, 570, 710), 2: Loop(5400, 0, 260, 110)}, {4: 1.2, 2: 2.4}
KEPT_BYTES = {4: 112 << 10, 2: 160 << 10}  # of a channel: f32 kept 98 KiB and not 128, f16 128 KiB and not 196
# Channels last, PyTorch's own: statistics and the result, then both of the backward pass. The last block adds up the tiles' sums, in `fixed`
LAST_STATISTICS, LAST_RESULT = Loop(12000, 500, 208, 350), Loop(0, 300, 130, 220)
LAST_SUMS, LAST_GRADIENT = Loop(12000, 400, 140, 100), Loop(0, 480, 200, 130)
# Channels of a tile, how many tiles there are one below the other at most, and numbers of a thread if fewer do
TILE, TILES, EACH = 32, 128, 16
# By cuDNN: cycles for each number, for each byte of it, and how much more that is from memory
CUDNN_LAST, CUDNN_LAST_BACKWARD = (0.35, 0.15, 0.5), (0.4, 0.2, 0.6)


def batch_norm(kernels: Kernels, args, tensors) -> float:
    """native_batch_norm(input, weight, bias, mean, variance, training, ...), also of inference; its launches included."""
    image, weight = args[0], args[1]
    launch, nbytes, shape = kernels.spec.kernel, image.nbytes, image.shape
    if len(args) > 5 and args[5] is False:
        return launch + kernels.working(2 * nbytes, EVALUATING * image.numel())
    if image.stride(1) == 1 and shape[1] > 1:
        if not _by_pytorch(image, weight):
            return 2 * launch + _semi_persistent(kernels, CUDNN_LAST, image, nbytes, 2 * nbytes)
        tiles = _tiles(shape)
        statistics = LAST_STATISTICS.seconds(kernels, *tiles, nbytes, nbytes)
        return 3 * launch + statistics + LAST_RESULT.seconds(kernels, *tiles, 2 * nbytes, 2 * nbytes)
    if _by_pytorch(image, weight):
        # between the two a small kernel: inverse deviation, running averages
        statistics = STATISTICS.seconds(kernels, shape[1], _steps(shape, WIDTHS), nbytes, nbytes)
        return 2.5 * launch + statistics + kernels.streaming(2 * nbytes)
    if nbytes // shape[1] <= KEPT_BYTES.get(image.itemsize, 0):
        return launch + KEPT[image.itemsize].seconds(kernels, shape[1], _kept_steps(image), nbytes, 2 * nbytes)
    return launch + CUDNN.seconds(kernels, shape[1], _steps(shape, CUDNN_WIDTHS, UNROLLED), nbytes, 3 * nbytes)


def batch_norm_backward(kernels: Kernels, args, tensors) -> float:
    """native_batch_norm_backward(gradient, input, weight, ..., train, eps, mask)."""
    image = args[1]
    launch, nbytes, shape = kernels.spec.kernel, image.nbytes, image.shape
    by_pytorch = not args[7] or _by_pytorch(image, args[2])
    if image.stride(1) == 1 and shape[1] > 1:
        if not by_pytorch:
            return 2 * launch + _semi_persistent(kernels, CUDNN_LAST_BACKWARD, image, 2 * nbytes, 3 * nbytes)
        tiles = _tiles(shape)
        sums = LAST_SUMS.seconds(kernels, *tiles, 3 * nbytes, 2 * nbytes)
        return 2 * launch + sums + LAST_GRADIENT.seconds(kernels, *tiles, 3 * nbytes, 3 * nbytes)
    if not by_pytorch and 2 * nbytes // shape[1] <= KEPT_BYTES.get(image.itemsize, 0):
        saved, steps = KEPT_BACKWARD[image.itemsize], _kept_steps(image)
        return launch + saved.seconds(kernels, shape[1], steps, 2 * nbytes, 3 * nbytes)
    loop, widths = (BACKWARD, WIDTHS) if by_pytorch else (CUDNN_BACKWARD, CUDNN_WIDTHS)
    return launch + loop.seconds(kernels, shape[1], _steps(shape, widths), 3 * nbytes, 5 * nbytes)


def _by_pytorch(image, weight) -> bool:
    """Is it PyTorch's kernel? Also where a weight goes to the CPU's kernel in single precision (engine/cuda_only_ops.py)."""
    half = weight is not None and (weight.itemsize == 2 or hasattr(weight, "stands_for_half"))
    return half or image.dtype == torch.bfloat16


def _steps(shape, widths: dict[int, int], unrolled: int = 1) -> int:
    """Numbers that one thread works on."""
    positions = prod(shape[2:])
    width = next((width for most, width in widths.items() if positions <= most), THREADS)
    return unrolled * ceil(positions / (width * unrolled)) * ceil(shape[0] / (THREADS // width))


def _kept_steps(image) -> float:
    return image.numel() / image.shape[1] / THREADS * (ODD[image.itemsize] if prod(image.shape[2:]) % 2 else 1.0)


def _tiles(shape) -> tuple[int, int]:
    """Blocks, and the steps of each, of an image with its channels last."""
    rows, height = prod(shape) // shape[1], THREADS // TILE
    below = min(ceil(rows / (height * EACH)), TILES)
    return ceil(shape[1] / TILE) * below, ceil(rows / (below * height))


def _semi_persistent(kernels: Kernels, costs: tuple[float, float, float], image, bytes_in: int, moved: int) -> float:
    """cuDNN's for channels last, which keeps what fits. bytes_in: what goes in."""
    number, byte, lost = costs
    return kernels.working(
        moved, image.numel() * (number + byte * image.itemsize * (1 + lost * kernels.lost(bytes_in)))
    )


# A row, which is one block's, and each of its bytes: of a root mean square norm and of all gradients (vectorized_layer_norm_kernel,
# layer_norm_grad_input_kernel_vectorized); of a layer norm, whose threads tell each other mean and variance
RMS, GRADIENT, LAYER = (140, 0.085), (150, 0.18), (355, 0.12)
# The gradient of a weight: each 32 columns are one block's, which goes down the rows (GammaBetaBackwardCUDAKernelTemplate): rows that it
# takes in a step, where there are at least so many; cycles of a step from the cache, and more from memory
STEPS, STEP, FROM_MEMORY = ((256, 256), (128, 128), (64, 64), (0, 8)), 1400, 800


def _rows(costs, limit: str, kernels: Kernels, args, tensors, at: int = 0, moved: int = 2) -> float:
    """A block for each row. at: which argument is cut into rows, and after it their shape; moved: tensors of its size, read and written."""
    x, shape = args[at : at + 2]
    cycles = costs[0] * (x.numel() // max(1, prod(shape))) + costs[1] * x.nbytes
    return kernels.spec.kernel + kernels.working(moved * x.nbytes, cycles, limit)


layer_norm = partial(_rows, LAYER, "layer_norm")  # native_layer_norm(input, shape, weight, bias, eps)
rms_norm = partial(_rows, RMS, "memory")  # _fused_rms_norm(input, shape, weight, eps)


def row_norm_backward(kernels: Kernels, args, tensors) -> float:
    """native_layer_norm_backward(gradient, input, shape, mean, deviation, weight, bias, mask), or _fused_rms_norm_backward(gradient, input,
    shape, 1 / root mean square, weight, mask): then the gradients of weight and bias."""
    x, rows = args[1], args[1].numel() // max(1, prod(args[2]))
    limit, mask = ("layer_norm", args[7]) if len(args) > 7 else ("memory", args[5])
    seconds = _rows(GRADIENT, limit, kernels, args, tensors, 1, 3)
    if not any(mask[1:]):
        return seconds
    steps, nbytes = ceil(rows / next(step for least, step in STEPS if rows >= least)), 2 * x.nbytes
    cycles = steps * (STEP + FROM_MEMORY * min(1.0, nbytes / kernels.cache if kernels.cache else 1.0))
    return seconds + kernels.spec.kernel + max(kernels.took(cycles), kernels.streaming(nbytes))
