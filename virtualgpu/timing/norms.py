"""Layer norm, root mean square norm and group norm: how long each of their kernels takes.

aten/src/ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu. Figures in cycles of a multiprocessor, of an H100, PyTorch 2.11
(tests/gpu/h100_profiled.csv).
"""

from math import ceil, prod

import torch

from virtualgpu.timing import reductions

WARP, BLOCK = 32, 512
# A row, which is one block's, and each of its bytes: vectorized_layer_norm_kernel, layer_norm_grad_input_kernel_vectorized
FORWARD, BACKWARD = (140, 0.085), (150, 0.18)
# The same of a layer norm, whose threads tell each other mean and variance, and put them together by a division
LAYER, LAYER_IN_16_BITS = (355, 0.12), (245, 0.185)
# The gradient of a weight: each 32 columns are one block's, which goes down the rows (GammaBetaBackwardCUDAKernelTemplate): rows that it
# takes in a step, where there are at least so many; cycles of a step from the cache, and more from memory. Of many short rows each 32 are a
# block's
STEPS, STEP, FROM_MEMORY = ((256, 256), (128, 128), (64, 64), (0, 8)), {1: 1200, 2: 1400}, 800
MANY, PARTIAL = 64 << 10, 32
# A group's mean and variance (RowwiseMomentsCUDAKernel): a block's beginning and end, from one number of a thread to its next, and each
# number
MOMENTS, MOMENTS_STEP, MOMENTS_NUMBER = 3000, 535, 0.52
# Each number of what comes out, in elementwise kernels that look up its channel's factors, forward and backward
SCALED, SCALED_BACKWARD = 0.57, 0.88
# A channel's sums going back (ComputeInternalGradientsCUDAKernel): of a block, each of its threads, and each number; images that one thread
# adds up for the gradients of weight and bias (GammaBetaBackwardCUDAKernel1)
SUMS, SUMS_THREAD, SUMS_NUMBER, IMAGE = 140, 0.57, 0.53, 240


def _rows(kernels, costs: tuple[float, float], tensor, columns: int, read: int, limit: str = "memory") -> float:
    """A block for each row, for a result of the tensor's size. read: how many such tensors are."""
    row, byte = costs
    computing = kernels.took((row * (tensor.numel() // columns) + byte * tensor.nbytes) / kernels.spec.processors)
    return kernels.spec.kernel + max(computing, kernels.streaming((read + 1) * tensor.nbytes, limit))


def layer_norm(kernels, args, tensors) -> float:
    """native_layer_norm(input, shape, weight, bias, eps)."""
    x = args[0]
    costs = LAYER_IN_16_BITS if x.itemsize == 2 else LAYER
    return _rows(kernels, costs, x, max(1, prod(args[1])), 1, "layer_norm")


def rms_norm(kernels, args, tensors) -> float:
    """_fused_rms_norm(input, shape, weight, eps)."""
    return _rows(kernels, FORWARD, args[0], max(1, prod(args[1])), 1)


def layer_norm_backward(kernels, args, tensors) -> float:
    """native_layer_norm_backward(gradient, input, shape, mean, deviation, weight, bias, mask)."""
    x, columns = args[1], max(1, prod(args[2]))
    seconds = _rows(kernels, BACKWARD, x, columns, 2, "layer_norm")
    return seconds + (_of_weight(kernels, x, columns, 2) if args[7][1] or args[7][2] else 0.0)


def rms_norm_backward(kernels, args, tensors) -> float:
    """_fused_rms_norm_backward(gradient, input, shape, 1 / root mean square, weight, mask)."""
    x, columns = args[1], max(1, prod(args[2]))
    seconds = _rows(kernels, BACKWARD, x, columns, 2)
    return seconds + (_of_weight(kernels, x, columns, 1) if args[5][1] else 0.0)


def _of_weight(kernels, x, columns: int, count: int) -> float:
    """The gradient of the weight, or those of weight and bias."""
    spec, rows, nbytes = kernels.spec, x.numel() // columns, 2 * x.nbytes
    if rows > MANY and columns // WARP < spec.processors / 2:
        parts = ceil(rows / PARTIAL)
        plan = reductions.plan_of_columns(parts, columns, spec)
        partial = parts * columns * x.itemsize
        return spec.kernel + kernels.streaming(nbytes + count * partial) + count * plan.seconds(kernels, partial)
    steps = ceil(rows / next(step for least, step in STEPS if rows >= least))
    waiting = steps * (STEP[count] + FROM_MEMORY * min(1.0, nbytes / kernels.cache if kernels.cache else 1.0))
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
    return max(kernels.took(number * x.numel() / kernels.spec.processors), kernels.streaming((read + 1) * x.nbytes))


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
