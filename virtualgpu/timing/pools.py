"""Pools: how long PyTorch's kernels take, which reckon where a number lies longer than memory takes to bring it.

Figures in cycles of a multiprocessor, of an H100, PyTorch 2.11 (tests/gpu/h100_profiled.csv; channels last: h100_kernels.csv).
"""

from math import ceil, prod

from virtualgpu.timing import atomics

# A number that comes out, and each that it looks at (MaxPool: DilatedMaxPool2d.cu, average: AveragePool2d.cu; one thread for each)
MAXIMUM, MAXIMUM_LAST, AVERAGE, LOOKED_AT = 2.4, 3.2, 2.1, 0.18
# Going back, a number of the input, which looks for the windows that it was in; channels last, a maximum's meet in shared memory
MAXIMUM_BACKWARD, MAXIMUM_BACKWARD_LAST, AVERAGE_BACKWARD, WINDOW = 2.7, 2.0, 4.2, 0.2
# Adaptive ones have a block of 32 x 8 threads for each channel of an image, however small it is (AdaptiveAveragePooling.cu): cycles of a
# block, and for each number that a thread looks at; going back by atomic operations
BLOCK, ADAPTIVE, ADAPTIVE_NUMBER, ADAPTIVE_BACKWARD = (32, 8), 600, 30, 530
LEAST = 2000  # cycles of one block by itself
# Three-dimensional ones have a block of 32 x 8 threads for each part of each plane of each channel of what comes out, or of its gradient (MaxPool3d.cu,
# AveragePool3d.cu): cycles of a block that looks at eight numbers; as many for its beginning as for these is supposed. Going back, a maximum is
# added atomically, in 32 bits and in 16
MAXIMUM_3D, AVERAGE_3D, AVERAGE_3D_BACKWARD, MAXIMUM_3D_BACKWARD, EIGHT = 1090, 1150, 1020, {4: 430, 2: 800}, 8


def _sides(value, dimensions: int = 2) -> tuple:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * dimensions if len(values) == 1 else values


def _window(args, at: int) -> tuple[float, float]:
    """(numbers in a window, windows that a number is in), by the place of its sides among the arguments; the strides come next."""
    sides = _sides(args[at])
    strides = _sides(args[at + 1]) if len(args) > at + 1 and args[at + 1] not in (None, [], ()) else sides
    return prod(sides), prod(ceil(side / stride) for side, stride in zip(sides, strides, strict=True))


def _threads(kernels, cycles: float, numbers: int, read: float, written: float) -> float:
    """A thread for each number, in so many cycles of a multiprocessor."""
    computing = kernels.took(cycles * numbers / kernels.spec.processors)
    return kernels.spec.kernel + max(computing, kernels.streaming(read + written))


def maximum(kernels, args, tensors) -> float:
    """max_pool2d_with_indices(x, sides, strides, ...)."""
    last = args[0].dim() == 4 and args[0].stride(1) == 1
    return _pooled(kernels, MAXIMUM_LAST if last else MAXIMUM, args, tensors)


def average(kernels, args, tensors) -> float:
    """avg_pool2d(x, sides, strides, ...)."""
    return _pooled(kernels, AVERAGE, args, tensors)


def _pooled(kernels, number: float, args, tensors) -> float:
    image, made = tensors[0], tensors[-1]
    looked_at, _ = _window(args, 1)
    return _threads(kernels, number + LOOKED_AT * looked_at, made.numel(), image.nbytes, made.nbytes)


def maximum_backward(kernels, args, tensors) -> float:
    """max_pool2d_with_indices_backward(gradient, x, ...), after zeros."""
    gradient, made = args[0], tensors[-1]
    number = MAXIMUM_BACKWARD_LAST if made.dim() == 4 and made.stride(1) == 1 else MAXIMUM_BACKWARD
    return kernels.filling(made.nbytes) + _threads(kernels, number, made.numel(), gradient.nbytes, made.nbytes)


def average_backward(kernels, args, tensors) -> float:
    """avg_pool2d_backward(gradient, x, sides, strides, ...)."""
    made = tensors[-1]
    _, windows = _window(args, 2)
    return _threads(kernels, AVERAGE_BACKWARD + WINDOW * windows, made.numel(), args[0].nbytes, made.nbytes)


def maximum_3d(kernels, args, tensors) -> float:
    """max_pool3d_with_indices(x, sides, strides, ...)."""
    return _of_planes(
        kernels, MAXIMUM_3D, prod(_sides(args[1], 3)), tensors[-1], tensors[0].nbytes + tensors[-1].nbytes
    )


def average_3d(kernels, args, tensors) -> float:
    """avg_pool3d(x, sides, strides, ...)."""
    return _of_planes(
        kernels, AVERAGE_3D, prod(_sides(args[1], 3)), tensors[-1], tensors[0].nbytes + tensors[-1].nbytes
    )


def maximum_3d_backward(kernels, args, tensors) -> float:
    """max_pool3d_with_indices_backward(gradient, x, ...), after zeros: what it adds to is read and written, with the lines around it."""
    gradient, made = args[0], tensors[-1]
    cycles = MAXIMUM_3D_BACKWARD[min(4, made.itemsize)]
    moved = 2 * made.nbytes + gradient.nbytes + 8 * gradient.numel()  # with the indices
    return kernels.filling(made.nbytes) + _of_planes(kernels, cycles, EIGHT, gradient, moved)


def average_3d_backward(kernels, args, tensors) -> float:
    """avg_pool3d_backward(gradient, x, sides, strides, ...), after zeros."""
    gradient, made = args[0], tensors[-1]
    moved = gradient.nbytes + made.nbytes
    return kernels.filling(made.nbytes) + _of_planes(
        kernels, AVERAGE_3D_BACKWARD, prod(_sides(args[2], 3)), gradient, moved
    )


def _of_planes(kernels, cycles: float, looked_at: int, image, moved: float) -> float:
    wide, tall = BLOCK
    blocks = prod(image.shape[:-2]) * ceil(image.shape[-1] / wide) * ceil(image.shape[-2] / tall)
    computing = kernels.took(blocks * cycles * (1 + looked_at / EIGHT) / 2 / kernels.spec.processors)
    return kernels.spec.kernel + max(computing, kernels.streaming(moved))


def _blocks(kernels, cycles: float, image) -> float:
    """A block for each channel of an image, so many cycles of a multiprocessor each."""
    planes = prod(image.shape[:-2])
    return kernels.took(max(LEAST, cycles * planes / kernels.spec.processors))


def _in_last(image) -> bool:
    return image.dim() == 4 and image.stride(1) == 1 and not image.is_contiguous()


def adaptive(kernels, args, tensors) -> float:
    """_adaptive_avg_pool2d(x, sides)."""
    image, made = tensors[0], tensors[-1]
    moving = kernels.streaming(image.nbytes + made.nbytes)
    if _in_last(image):  # other kernels, which nobody measured
        return kernels.spec.kernel + moving
    looked_at, rounds = _of_block(image, made)
    computing = _blocks(kernels, ADAPTIVE + ADAPTIVE_NUMBER * looked_at * rounds, image)
    return kernels.spec.kernel + max(computing, moving)


def _of_block(image, made) -> tuple[int, int]:
    """(numbers of the image in one of what is made, how many of these a thread has)."""
    (height, width), (tall, wide) = image.shape[-2:], made.shape[-2:]
    return ceil(height / tall) * ceil(width / wide), ceil(wide / BLOCK[0]) * ceil(tall / BLOCK[1])


def adaptive_backward(kernels, args, tensors) -> float:
    """_adaptive_avg_pool2d_backward(gradient, x), after zeros."""
    gradient, made = args[0], tensors[-1]
    if _in_last(gradient):
        return 2 * kernels.spec.kernel + kernels.streaming(gradient.nbytes + made.nbytes)
    looked_at, _ = _of_block(made, gradient)
    adding = looked_at * prod(gradient.shape[-2:]) * atomics.plain(made).warp / atomics.WARP
    return kernels.filling(made.nbytes) + kernels.spec.kernel + _blocks(kernels, ADAPTIVE_BACKWARD + adding, made)
