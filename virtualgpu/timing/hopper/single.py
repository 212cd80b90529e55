"""Convolutions in single precision, without TF32, on a Hopper: how long cuDNN's kernels take, forward and for both gradients.

Those without groups; three dimensions were not measured. There are several ways, of which the one of the shortest time is taken: no factors for cuDNN's guesses
make it better.

Forward: a product of matrices (implicit GEMM) in tiles. The gradient of the image: the same with all taps, whatever the strides; or products
of the gradient with each tap's weight, added to the image in place (dgrad_engine); or by Fourier transforms. That of the weight: tiles of it, each
by one block along all images; or parts of their sums, added in place (wgrad_alg0_engine); or Winograd's way. Most want the channels
first: images and weights that have them last are reordered before, and the result after.

From 696 convolutions on an H100 (cuDNN 9.19, PyTorch 2.11, torch.profiler, which names each kernel and its tiles; tests/gpu/h100_convolutions.csv):
cycles of a multiprocessor. 71 % are within 15 % and 83 % within 30 %; of a quarter held back from the fits (though not from the eye) 68 and 82 %.
Left out are kernels that cuDNN takes now and then though far from the best (alg1_engine, precomputed_convolve_sgemm), and Fourier's way forward.
"""

from math import ceil, prod
from typing import NamedTuple

from torch import Tensor

from virtualgpu.timing.hopper import reordering
from virtualgpu.timing.hopper.convolution import Convolution
from virtualgpu.timing.kernels import Kernels


class Tile(NamedTuple):
    """rows, columns: of one block. step: cycles for each number along the sum; wait: no fewer, however few blocks there are. start: of the kernel.
    written: cycles for each number of the tile. beside: so many blocks come and go together, as they share a multiprocessor: two of
    32 x 32, of two warps each, fill its four schedulers."""

    rows: int
    columns: int
    step: float
    wait: float
    start: int
    written: float = 0.0
    beside: int = 1


# sm80_xmma_fprop_implicit_gemm_.._ffma; weights of more numbers than LARGE have but the last
FORWARD = (
    Tile(256, 64, 193, 0, 12000, 0.4, beside=2),
    Tile(128, 32, 69, 50, 10000, 0.4),
    Tile(32, 32, 20.4, 46, 8600, 0.3, beside=2),
)
LARGE = 1_100_000
# More taps or longer strides: .._indexed_..
INDEXED, TAPS, STRIDE = Tile(32, 32, 30, 74, 15000, 0.3), 25, 2
# Those, and sums of up to SHORT numbers, may also go to implicit_convolve_sgemm, or, channels last, convolve_common_engine_float_NHWC. Of which
# the second is for strides from FAR on, and channels last for 1x1: no number is read twice
DIRECT, APART, SHORT, FAR = Tile(32, 32, 23.3, 45, 5000, 0.75), Tile(32, 32, 42, 60, 5000, 0.75), 100, 8
IMAGE = Tile(32, 32, 21.5, 49, 6900, 0.7, beside=2)  # sm80_xmma_dgrad_implicit_gemm_.._ffma
# dgrad_engine: rows are the gradient's places, columns the image's channels with their taps. Cycles for each number that is added; strides scatter
# them, unless more than MEETING meet at one place. A kernel clears the image before (scalePackedTensor_kernel): cycles for a block of numbers
ADDED, ADDING, SCATTERED, MEETING = Tile(32, 64, 23.2, 65, 13000), 1.41, 2.47, 4
CLEARING, CLEARED, BLOCK, BLOCKS = 2000, 200, 256, 65535
# Fourier transforms of windows (fft2d_r2c_32x32, fft2d_c2r_32x32), cycles for each of the images' and of the weight's, and their beginnings; between
# them products of complex numbers, one for each frequency. For 3x3 of stride 1
WINDOW, FREQUENCIES, TRANSFORMED, OF_THE_WEIGHT, TRANSFORMING = 32, 544, 1000, 474, 9000
COMPLEX = (
    Tile(32, 32, 52, 0, 6400, 0.6),
    Tile(32, 64, 86, 0, 25000, 0.4),
    Tile(64, 64, 149, 0, 45000, 0.6),
)
# sm80_xmma_wgrad_implicit_gemm_indexed_.._ffma, and its wait where the images are larger than half of the second-level cache
WEIGHT, FROM_MEMORY = Tile(32, 32, 15.6, 39, 5000, beside=2), 65
# wgrad_alg0_engine: up to so many places of an image are one part; cycles for each that is added to the same numbers. 1x1 with its channels first
# takes longer
PARTS, PART, SAME, FIRST = Tile(32, 32, 27, 100, 11000), 512, 80, 1.9
# Winograd's (winograd_nonfused), for 3x3 of stride 1 and so many channels at least: places at once each way, products between, cycles to turn those
# places of a channel, and to turn a number of the weight back; beginnings
CHANNELS, AT_ONCE, PRODUCTS, TURNED, TURNED_BACK, TURNING = 32, 4, 36, 19, 12, 8000
BETWEEN = Tile(32, 32, 21, 25, 4000, beside=2), Tile(64, 64, 51, 51, 6000), Tile(128, 128, 162, 0, 6000)


def seconds(kernels: Kernels, convolution: Convolution) -> float:
    """With its launches."""
    ways = {"forward": _forward, "image": _image, "weight": _weight}[convolution.way]
    return min(ways(kernels, convolution.made, convolution.image, convolution))


def _forward(kernels: Kernels, small: Tensor, large: Tensor, convolution: Convolution) -> list[float]:
    """Seconds of each way to it, of `small`, what is made of the image `large`; so below."""
    taps, stride, weight = convolution.taps, max(convolution.stride), convolution.weight
    sizes = _positions(small), small.shape[1], large.shape[1] * taps
    indexed = taps > TAPS or stride > STRIDE
    menu = (INDEXED,) if indexed else FORWARD[-1:] if taps > 1 and weight.numel() > LARGE else FORWARD
    turned = _turned(kernels, small, large, weight)
    ways = [turned + _tiled(kernels, tile, *sizes) for tile in menu]
    if indexed or sizes[2] <= SHORT:
        direct = APART if stride >= FAR or (taps == 1 and _last(large)) else DIRECT
        ways.append(_tiled(kernels, direct, *sizes))
    return ways


def _image(kernels: Kernels, small: Tensor, large: Tensor, convolution: Convolution) -> list[float]:
    taps, channels, length = convolution.taps, large.shape[1], small.shape[1]
    turned = _turned(kernels, small, large, convolution.weight)
    whole = _tiled(kernels, IMAGE, _positions(large), channels, length * taps)
    products = _tiled(kernels, ADDED, prod(small.shape[2:]), channels * taps, length, small.shape[0])
    adding = _positions(small) * taps * channels / kernels.cycles
    scattered = max(convolution.stride) > 1 and _positions(small) * taps < MEETING * _positions(large)
    blocks = min(ceil(large.numel() / BLOCK), BLOCKS)
    clearing = max(CLEARED * blocks / kernels.cycles, large.nbytes / kernels.bandwidth["memory"])
    added = products + (SCATTERED if scattered else ADDING) * adding + kernels.took(CLEARING) + clearing
    ways = [turned + whole, turned + added]
    if _three(convolution):
        ways.append(turned + _fourier(kernels, small, large))
    return ways


def _fourier(kernels: Kernels, small: Tensor, large: Tensor) -> float:
    """Window after window of the images."""
    batch, made, read = large.shape[0], large.shape[1], small.shape[1]
    windows = prod(ceil(size / (WINDOW - 2)) for size in large.shape[2:])
    transforms = 2 * kernels.took(TRANSFORMING) + batch * (made + read) * TRANSFORMED / kernels.cycles
    product = min(_tiled(kernels, tile, batch, made, read, FREQUENCIES) for tile in COMPLEX)
    of_the_weight = kernels.took(TRANSFORMING) + made * read * OF_THE_WEIGHT / kernels.cycles
    return of_the_weight + windows * (transforms + product)


def _weight(kernels: Kernels, small: Tensor, large: Tensor, convolution: Convolution) -> list[float]:
    weight, taps = convolution.weight, convolution.taps
    rows, columns, last = large.shape[1], small.shape[1], _last(large)
    beyond = small.nbytes + large.nbytes > kernels.cache / 2
    tile = WEIGHT._replace(wait=FROM_MEMORY) if beyond else WEIGHT
    whole = _tiled(kernels, tile, rows * taps, columns, _positions(small))
    if not last:  # alone of all, it wants them last
        whole += sum(reordering.seconds(kernels, tensor) for tensor in (small, large, weight)[: 3 if taps > 1 else 2])
    each = ceil(prod(small.shape[2:]) / PART)
    count = small.shape[0] * each
    blocks = count * ceil(rows * taps / PARTS.rows) * ceil(columns / PARTS.columns) / kernels.spec.processors
    step = max(PARTS.wait, blocks * PARTS.step * (FIRST if taps == 1 and not last else 1.0))
    parts = kernels.filling(0) + kernels.took(PARTS.start + _positions(small) / max(1, count) * step + SAME * count)
    ways = [whole, parts]
    if _three(convolution) and min(rows, columns) >= CHANNELS:
        ways.append(_turned(kernels, small, large, weight) + _winograd(kernels, small, large))
    return ways


def _winograd(kernels: Kernels, small: Tensor, large: Tensor) -> float:
    read, made = large.shape[1], small.shape[1]
    length = small.shape[0] * prod(ceil(size / AT_ONCE) for size in small.shape[2:])
    cycles = TURNED * length * (read + made) + TURNED_BACK * read * made
    product = min(_tiled(kernels, tile, made, read, length, PRODUCTS) for tile in BETWEEN)
    return kernels.took(TURNING) + cycles / kernels.cycles + product


def _tiled(kernels: Kernels, tile: Tile, rows: int, columns: int, length: int, count: int = 1) -> float:
    """`count` products by such tiles."""
    blocks = count * ceil(rows / tile.rows) * ceil(columns / tile.columns) / kernels.spec.processors
    blocks = ceil(blocks) if blocks <= tile.beside else tile.beside * ceil(blocks / tile.beside)
    writing = blocks * tile.written * tile.rows * tile.columns
    return kernels.took(tile.start + length * max(tile.wait, blocks * tile.step) + writing)


def _turned(kernels: Kernels, *tensors: Tensor) -> float:
    """Reordered, those that have their channels last."""
    return sum(
        reordering.seconds(kernels, tensor) for tensor in tensors if _last(tensor) and prod(tensor.shape[2:]) > 1
    )


def _three(convolution: Convolution) -> bool:
    """3x3, of stride 1?"""
    return tuple(convolution.weight.shape[2:]) == (3, 3) and {*convolution.stride, *convolution.dilation} == {1}


def _last(tensor: Tensor) -> bool:
    return tensor.shape[1] > 1 and tensor.stride(1) == 1


def _positions(image: Tensor) -> int:
    return image.shape[0] * prod(image.shape[2:])
