"""Images made larger or smaller (F.interpolate): how long PyTorch's kernels take, which memory seldom holds up.

aten/src/ATen/native/cuda/UpSampleBilinear2d.cu and UpSampleBicubic2d.cu: channels first, a thread has one place of the result and goes
through all images and channels one after the other, so that a small result leaves most of a GPU idle, and each step waits for memory.
Going back, it adds atomically. UpSampleNearest2d.cu: a thread has four channels, and going back one number of the input, for which it
reads all that were made of it. Channels last, each number has a thread; that was not measured.

UpSampleLinear1d.cu and UpSampleTrilinear3d.cu are like the bilinear one, but going back a thread adds to its numbers one by one; in 16 bits, for
which there is no such addition, it tries until nobody came between. UpSampleNearest3d.cu: a thread goes through the images.

Figures in cycles of a multiprocessor, of an H100, PyTorch 2.11 (tests/gpu/h100_profiled.csv).
"""

from math import ceil, prod

from virtualgpu.timing import atomics

BLOCK = 1024  # threads
NEAREST_BLOCK = 512
# Of a bilinear result: from one channel to the next where a line of the cache holds many, more where it is another line, and again where
# what goes in and out does not stay in the second-level cache (0.42 and 0.45 us a step for 1024 channels in h100_kernels.csv); each number,
# where all multiprocessors are at work
STEP, ANOTHER_LINE, FROM_MEMORY, BILINEAR = 260, 150, 400, 0.62
# Of a bicubic one, whose 16 numbers are read and multiplied in each step
BICUBIC_STEP, BICUBIC = 900, 1.97
# Of a nearest neighbour's numbers, and the share of the bandwidth that their narrow writes reach; going back, of a row that was made of one
# number and of each number in it, and of what a thread writes
NEAREST, NEAREST_SHARE, ROW, IN_ROW, WRITTEN = 0.48, 0.72, 554, 87, 0.8
# Of a linear result's step, and more where what goes in and out is larger than a half of the second-level cache; its additions of 16 bits
LINEAR_STEP, LINEAR_FROM_MEMORY, LINEAR_HALVES = 365, 360, 5000
# Of a trilinear one: a step, and each number; the same going back, in 32 bits and in 16
TRILINEAR_STEP, TRILINEAR, TRILINEAR_BACK = 560, 1.7, {4: (890, 4.5), 2: (2700, 8.2)}
# Of a nearest neighbour's thread in three dimensions, and of each image that it goes through; going back, of each number that it reads in one
NEAREST_3D, NEAREST_3D_IMAGE, NEAREST_3D_BACK, NEAREST_3D_READ = 2.5, 0.35, 1.6, 0.4
# Numbers of 32 bits that the first-level cache gives at once; threads that read one bank wait for each other
BANKS = 32


def _is_last(image) -> bool:
    """Is it read and written with channels last? So few as three are not."""
    return image.stride(1) == 1 and image.shape[1] >= 4 and not image.is_contiguous()


def _planes(image) -> tuple[int, int]:
    """(images times channels, places)."""
    return image.shape[0] * image.shape[1], prod(image.shape[2:])


def _through_channels(kernels, made, step: float, number: float) -> float:
    """A thread for each place of what is made goes through the channels. step: its cycles for one; number: those of a multiprocessor."""
    planes, places = _planes(made)
    busiest = number * made.numel() / kernels.spec.processors
    if _is_last(made):
        return kernels.took(busiest)
    rounds = ceil(ceil(places / BLOCK) / (kernels.spec.processors * (kernels.spec.limits.threads // BLOCK)))
    return kernels.took(max(rounds * step * planes, busiest))


def bilinear(kernels, args, tensors) -> float:
    """upsample_bilinear2d_out_frame."""
    image, made = tensors[0], tensors[-1]
    _, places = _planes(image)
    waiting = ANOTHER_LINE + (FROM_MEMORY if image.nbytes + made.nbytes > kernels.cache else 0)
    step = STEP + waiting * min(1.0, places * image.itemsize / atomics.LINE)
    computing = _through_channels(kernels, made, step, BILINEAR)
    return kernels.spec.kernel + max(computing, kernels.streaming(image.nbytes + made.nbytes))


def bicubic(kernels, args, tensors) -> float:
    """upsample_bicubic2d_out_frame, after zeros where it writes."""
    made = tensors[-1]
    return kernels.filling(made.nbytes) + kernels.spec.kernel + _through_channels(kernels, made, BICUBIC_STEP, BICUBIC)


def bilinear_backward(kernels, args, tensors) -> float:
    """upsample_bilinear2d_backward_out_frame: a thread for each number of the gradient adds to four, after zeros."""
    gradient, made = tensors[0], tensors[-1]
    _, places = _planes(gradient)
    spec = kernels.spec
    # images whose gradients the threads that run together have
    at_once = spec.processors * spec.limits.threads / places
    lines = made.nbytes / atomics.LINE
    if not _is_last(made):
        lines = min(lines, at_once * _planes(made)[1] * made.itemsize / atomics.LINE)
    apart = made.shape[-1] / gradient.shape[-1]
    blocks = gradient.numel() / BLOCK
    adding = atomics.fast(made).seconds(kernels, 4 * gradient.numel(), made.itemsize, lines, blocks, apart)
    return kernels.filling(made.nbytes) + spec.kernel + max(adding, kernels.streaming(gradient.nbytes))


def bicubic_backward(kernels, args, tensors) -> float:
    """upsample_bicubic2d_backward_out_frame: as forward, but each step adds to 16 numbers. Blocks go on by themselves: where an image has
    less than a line, each block soon is at another one."""
    gradient, made = tensors[0], tensors[-1]
    places, places_made = _planes(gradient)[1], _planes(made)[1]
    lines, blocks = places_made * made.itemsize / atomics.LINE, places / BLOCK
    lines = lines if lines >= 1 else blocks
    apart = made.shape[-1] / gradient.shape[-1]
    adding = atomics.plain(made).seconds(kernels, 16 * gradient.numel(), made.itemsize, lines, ceil(blocks), apart)
    return kernels.filling(made.nbytes) + kernels.spec.kernel + adding


def linear(kernels, args, tensors) -> float:
    """upsample_linear1d_out_frame, after zeros where it writes."""
    made = tensors[-1]
    step = _linear_step(kernels, tensors)
    return kernels.filling(made.nbytes) + kernels.spec.kernel + _through_channels(kernels, made, step, BILINEAR)


def linear_backward(kernels, args, tensors) -> float:
    """upsample_linear1d_out_frame_backward, after zeros."""
    gradient, made = tensors[0], tensors[-1]
    step = LINEAR_HALVES if made.itemsize == 2 else _linear_step(kernels, tensors)
    return kernels.filling(made.nbytes) + kernels.spec.kernel + _through_channels(kernels, gradient, step, BILINEAR)


def _linear_step(kernels, tensors) -> float:
    beyond = tensors[0].nbytes + tensors[-1].nbytes > kernels.cache / 2
    return LINEAR_STEP + (LINEAR_FROM_MEMORY if beyond else 0)


def trilinear(kernels, args, tensors) -> float:
    """upsample_trilinear3d_out_frame."""
    image, made = tensors[0], tensors[-1]
    computing = _through_channels(kernels, made, TRILINEAR_STEP, TRILINEAR)
    return kernels.spec.kernel + max(computing, kernels.streaming(image.nbytes + made.nbytes))


def trilinear_backward(kernels, args, tensors) -> float:
    """upsample_trilinear3d_backward_out_frame: a thread for each place of the gradient adds to eight numbers in each step, after zeros."""
    gradient, made = tensors[0], tensors[-1]
    adding = _through_channels(kernels, gradient, *TRILINEAR_BACK[min(4, made.itemsize)])
    return kernels.filling(made.nbytes) + kernels.spec.kernel + adding


def nearest_3d(kernels, args, tensors) -> float:
    """upsample_nearest3d_out_frame."""
    image, made = tensors[0], tensors[-1]
    batch = made.shape[0]
    cycles = (NEAREST_3D + NEAREST_3D_IMAGE * batch) * made.numel() / max(1, batch) / kernels.spec.processors
    return kernels.spec.kernel + max(kernels.took(cycles), kernels.streaming(image.nbytes + made.nbytes))


def nearest_3d_backward(kernels, args, tensors) -> float:
    """upsample_nearest3d_backward_out_frame."""
    gradient, made = tensors[0], tensors[-1]
    batch = made.shape[0]
    read = NEAREST_3D_READ * batch * gradient.numel() / max(1, made.numel())
    cycles = (NEAREST_3D_BACK + read) * made.numel() / max(1, batch) / kernels.spec.processors
    return kernels.spec.kernel + max(kernels.took(cycles), kernels.streaming(gradient.nbytes + made.nbytes))


def nearest(kernels, args, tensors) -> float:
    """upsample_nearest1d_out_frame and upsample_nearest2d_out_frame, whose blocks are as wide as a power of two."""
    image, made = tensors[0], tensors[-1]
    numbers, width = made.numel(), made.shape[-1]
    if not _is_last(made):
        block = min(NEAREST_BLOCK, 1 << max(1, width).bit_length() - 1)
        numbers = numbers // max(1, width) * ceil(width / block) * block
    computing = kernels.took(NEAREST * numbers / kernels.spec.processors)
    return kernels.spec.kernel + max(computing, kernels.streaming(image.nbytes + made.nbytes) / NEAREST_SHARE)


def nearest_backward(kernels, args, tensors) -> float:
    """upsample_nearest1d_backward_out_frame and upsample_nearest2d_backward_out_frame: a thread goes through the images, and through all that was made of its number."""
    gradient, made = tensors[0], tensors[-1]
    spec, batch = kernels.spec, made.shape[0]
    threads = made.numel() / max(1, batch)
    ratios = [max(1.0, one / max(1, other)) for one, other in zip(gradient.shape[2:], made.shape[2:], strict=True)]
    down, wide = prod(ratios[:-1]), ratios[-1]
    rounds = ceil(threads / (spec.processors * spec.limits.threads))
    waiting = rounds * batch * down * (ROW + IN_ROW * (wide - 1))
    words = int(wide * gradient.itemsize) // 4  # from what a thread reads to what its neighbour does
    conflicts = 1 if _is_last(made) else _common(words, BANKS)
    on_one = min(threads, NEAREST_BLOCK * ceil(ceil(threads / NEAREST_BLOCK) / spec.processors))
    waiting = max(waiting, batch * down * wide * on_one * conflicts / BANKS, WRITTEN * made.numel() / spec.processors)
    return spec.kernel + max(kernels.took(waiting), kernels.streaming(gradient.nbytes + made.nbytes))


def _common(words: int, banks: int) -> int:
    """Threads of a warp that read the same bank: the largest power of two in the distance."""
    return min(banks, words & -words) if words else 1
