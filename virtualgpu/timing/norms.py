"""Root mean square norm and group norm: how long each of their kernels takes.

aten/src/ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu. Figures in cycles of a multiprocessor, of an H100, PyTorch 2.11
(tests/gpu/h100_profiled.csv).
"""

from math import ceil, prod

import torch

from virtualgpu.timing import reductions

WARP, BLOCK = 32, 512
# A row, which is one block's, and each of its bytes: vectorized_layer_norm_kernel, layer_norm_grad_input_kernel_vectorized
FORWARD, BACKWARD = (140, 0.085), (150, 0.18)
# The gradient of a weight: each 32 columns are one block's, which goes down the rows (GammaBetaBackwardCUDAKernelTemplate): rows that it
# takes in a step, where there are at least so many; cycles of a step from the cache, and more from memory. Of many short rows each 32 are a
# block's
STEPS, STEP, FROM_MEMORY = ((256, 256), (128, 128), (64, 64), (0, 8)), 1200, 800
MANY, PARTIAL = 64 << 10, 32
# A group's mean and variance (RowwiseMomentsCUDAKernel): a block's beginning and end, from one number of a thread to its next, and each
# number
MOMENTS, MOMENTS_STEP, MOMENTS_NUMBER = 3000, 535, 0.52
# Each number of what comes out, in elementwise kernels that look up its channel's factors, forward and backward
SCALED, SCALED_BACKWARD = 0.57, 0.88
# A channel's sums going back (ComputeInternalGradientsCUDAKernel): of a block, each of its threads, and each number; images that one thread
# adds up for the gradients of weight and bias (GammaBetaBackwardCUDAKernel1)
SUMS, SUMS_THREAD, SUMS_NUMBER, IMAGE = 140, 0.57, 0.53, 240


def _rows(kernels, costs: tuple[float, float], tensor, rows: int, read: float, written: float) -> float:
    """A block for each row."""
    row, byte = costs
    computing = kernels.took((row * rows + byte * tensor.nbytes) / kernels.spec.processors)
    return kernels.spec.kernel + max(computing, kernels.streaming(read, written))


def rms_norm(kernels, args, tensors) -> float:
    """_fused_rms_norm(input, shape, weight, eps)."""
    x = args[0]
    return _rows(kernels, FORWARD, x, x.numel() // max(1, prod(args[1])), x.nbytes, x.nbytes)


def rms_norm_backward(kernels, args, tensors) -> float:
    """_fused_rms_norm_backward(gradient, input, shape, 1 / root mean square, weight, mask)."""
    x, columns = args[1], max(1, prod(args[2]))
    rows = x.numel() // columns
    seconds = _rows(kernels, BACKWARD, x, rows, 2 * x.nbytes, x.nbytes)
    return seconds + (_of_weight(kernels, rows, columns, x.itemsize) if args[4] is not None and args[5][1] else 0.0)


def _of_weight(kernels, rows: int, columns: int, size: int) -> float:
    """The gradient of the weight."""
    spec, nbytes = kernels.spec, 2 * rows * columns * size
    if rows > MANY and columns // WARP < spec.processors / 2:
        parts = ceil(rows / PARTIAL)
        plan = reductions.plan_of_columns(parts, columns, spec)
        partial = parts * columns * size
        return spec.kernel + kernels.streaming(nbytes, partial) + plan.seconds(kernels, partial)
    steps = ceil(rows / next(step for least, step in STEPS if rows >= least))
    waiting = steps * (STEP + FROM_MEMORY * min(1.0, nbytes / kernels.cache if kernels.cache else 1.0))
    return spec.kernel + max(kernels.took(waiting), kernels.streaming(nbytes))


def group_norm(kernels, args, tensors) -> float:
    """native_group_norm(input, weight, bias, images, channels, places, groups, eps): moments, factors of each channel, and what comes of
    them."""
    x: torch.Tensor = args[0]
    images, channels, places, groups = args[3:7]
    spec, blocks = kernels.spec, max(1, images * groups)
    numbers = channels // groups * places
    each = ceil(numbers / (BLOCK if numbers >= BLOCK else WARP))
    busiest = MOMENTS_NUMBER * numbers * ceil(blocks / spec.processors)
    rounds = ceil(blocks / (spec.processors * (spec.limits.threads // BLOCK)))
    moments = kernels.took(MOMENTS + max(rounds * each * MOMENTS_STEP, busiest))
    return 3 * spec.kernel + max(moments, kernels.streaming(x.nbytes)) + _scaled(kernels, SCALED, x, 1)


def _scaled(kernels, number: float, x, read: int) -> float:
    """An elementwise kernel that reads so many images, without its launch."""
    return max(kernels.took(number * x.numel() / kernels.spec.processors), kernels.streaming(read * x.nbytes, x.nbytes))


def group_norm_backward(kernels, args, tensors) -> float:
    """native_group_norm_backward(gradient, input, mean, deviation, weight, images, channels, places, groups, mask): sums of each channel,
    two kernels for factors, the gradient of the image, and those of weight and bias."""
    x: torch.Tensor = args[1]
    images, channels, places = args[5:8]
    spec = kernels.spec
    threads = BLOCK if places >= BLOCK else WARP
    block = SUMS + SUMS_THREAD * threads + SUMS_NUMBER * places
    sums = max(kernels.took(block * images * channels / spec.processors), kernels.streaming(2 * x.nbytes))
    seconds = 4 * spec.kernel + sums + _scaled(kernels, SCALED_BACKWARD, x, 2)
    return seconds + (spec.kernel + kernels.took(IMAGE * images) if args[4] is not None else 0.0)
