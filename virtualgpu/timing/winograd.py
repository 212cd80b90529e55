"""Convolutions of 3x3 and stride 1 in single precision before Hopper: how long cuDNN's kernels take, forward and for the gradient of the image.

There are three ways, of which the one of the shortest time is taken. All are cut into tiles, and the last round of tiles is waited for:

- Winograd's in one kernel (winograd_128x128_ldg1_ldg4_relu_tile148t, .._tile442t): 32 channels of 32 squares of 2 x 2 places, each by 16
  multiplications a channel read instead of 36. A kernel turns the weight before.
- Winograd's in four (winograd_nonfused, sgemm): squares of 4 x 4 places by 36 products of matrices, with the image, the weight and the
  result turned before and after, as memory bears it.
- Directly (scudnn_128x128, .._128x64, .._128x32): a product of matrices (implicit GEMM).

Tiles and their numbers are those of the grids that NeuSight's traces name, of 17,872 convolutions of random sizes on five cards (PyTorch 2.1,
cuDNN 8.9; less what its host takes before the launch: tests/accuracy/convolutions.py). Constants are fitted to half of the shapes on an A100, a V100
(both with PCIe, at what they reach there of plain products) and a P100, which ways there are was chosen by a second quarter. Of the last quarter 79, 78
and 87 % are within 15 % and 86, 95 and 97 % within 30 %. What stays off is mostly a way far from the best, which cuDNN takes for no reason that sizes
tell. Turing keeps the share that it had (`convolutions.WINOGRAD`): two T4s, which lower their clocks, took 0.78 and 1.29 of these rules
(NeuSight's and dlperf's). So do cards before Volta, on which no PyTorch of today runs: the tutorial's table of a K80, read as a P100's, fits
that better. Gradients of the weight and transposed convolutions were not measured.
"""

from math import ceil, gcd, prod
from typing import NamedTuple

from torch import Tensor

from virtualgpu.hardware.datasheet import FLOAT32
from virtualgpu.timing.kernels import Kernels

VOLTA, TURING, AMPERE = (7, 0), (7, 5), (8, 0)  # capabilities
# Channels of one block of the first way; channels read are filled up
CHANNELS, READ = 32, 8
# Multiplications for each channel read, of such a block: 16 for each of 32 squares and 32 channels
MULTIPLIED = 16 * 32 * CHANNELS
# The second way: places of a square each way, products, images that are filled up to a multiple
SQUARE, PRODUCTS, IMAGES = 4, 36, 16
# Rows and columns of the third way's tiles, and what the smallest reaches of the others
DIRECT_TILES = ((128, 128, 1.0), (128, 64, 1.0), (128, 32, 0.9))
START, FIRST = 3500, 8  # cycles of each round beside the multiplications, and channels that pass before the first
# Time over that of memory: turning the weight for the one kernel; the image and the result for the products
WEIGHT, IMAGE, RESULT = 1.16, 1.6, 0.9
SECTOR = 8  # numbers that lie side by side in one sector of memory


class Generation(NamedTuple):
    """blocks: images, rows and columns of one of the first way. tiles: of the products, as of DIRECT_TILES. longer: time over that at the card's
    share of plain products, of the one kernel, of the products, directly. spread: over that of memory, turning the weight for the products, and so
    much more where no two of SECTOR numbers belong to the same sector: of channels that are a multiple of SECTOR all do."""

    blocks: tuple[tuple[int, int, int], ...]
    tiles: tuple[tuple[int, int, float], ...]
    longer: tuple[float, float, float]
    spread: tuple[float, float]


UP_TO_VOLTA = Generation(
    blocks=((1, 8, 16),),
    tiles=((64, 64, 1.0), (128, 64, 1.0), (32, 128, 1.0), (128, 32, 1.0)),  # volta_sgemm_64x64_nn and so on
    longer=(1.08, 0.96, 1.04),
    spread=(2.5, 2.1),
)
FROM_AMPERE_ON = Generation(
    blocks=((1, 8, 16), (4, 8, 4)),
    tiles=((128, 128, 1.0),),  # ampere_sgemm_128x128_nn
    longer=(1.43, 1.14, 1.32),
    spread=(1.9, 0.7),
)


def applies(kernels: Kernels, which: str, image: Tensor, weight: Tensor, stride, dilation, groups: int, key) -> bool:
    """Is that such a convolution? which: forward, or the gradient of the "image" or of the "weight"."""
    shape = tuple(weight.shape[2:]) == (3, 3) and {*stride, *dilation} == {1} and groups == 1 and image.dim() == 4
    known = kernels.spec.capability >= VOLTA and kernels.spec.capability != TURING
    return shape and known and key == FLOAT32 and which != "weight" and not kernels.peak


def seconds(kernels: Kernels, made: Tensor, read: Tensor) -> float:
    """With its launches. made: the image that is made, read: the one that it is made from."""
    launch = kernels.spec.kernel
    return min(
        2 * launch + _in_one(kernels, made, read),
        4 * launch + _in_four(kernels, made, read),
        2 * launch + _directly(kernels, made, read),
    )


def _generation(kernels: Kernels) -> Generation:
    return FROM_AMPERE_ON if kernels.spec.capability >= AMPERE else UP_TO_VOLTA


def _in_one(kernels: Kernels, made: Tensor, read: Tensor) -> float:
    """Without launches, as all below."""
    wide, channels = read.shape[1], ceil(made.shape[1] / CHANNELS)
    size = made.shape[0], *made.shape[2:]
    step = 2 * MULTIPLIED / _rate(kernels, 0) * ceil(wide / READ) * READ
    count = min(
        channels * prod(ceil(a / b) for a, b in zip(size, block, strict=True)) for block in _generation(kernels).blocks
    )
    turned = (9 + 16) * wide * made.shape[1]
    return _rounds(kernels, count) * (step + kernels.took(START)) + WEIGHT * _moving(kernels, turned)


def _in_four(kernels: Kernels, made: Tensor, read: Tensor) -> float:
    wide, channels = read.shape[1], made.shape[1]
    squares = ceil(made.shape[0] / IMAGES) * IMAGES * prod(ceil(size / SQUARE) for size in made.shape[2:])
    image = read.numel() + PRODUCTS * squares * wide
    weight = (9 + PRODUCTS) * wide * channels
    result = made.numel() + PRODUCTS * squares * channels
    product = _product(kernels, _generation(kernels).tiles, 1, PRODUCTS, squares, channels, wide)
    return product + _moving(kernels, IMAGE * image + _spread(kernels, wide) * weight + RESULT * result)


def _spread(kernels: Kernels, channels: int) -> float:
    together, apart = _generation(kernels).spread
    return together + apart * (1 - gcd(channels, SECTOR) / SECTOR)


def _directly(kernels: Kernels, made: Tensor, read: Tensor) -> float:
    places = made.shape[0] * prod(made.shape[2:])
    return _product(kernels, DIRECT_TILES, 2, 1, places, made.shape[1], 9 * read.shape[1])


def _product(kernels: Kernels, tiles, way: int, count: int, rows: int, columns: int, length: int) -> float:
    """`count` products by the best of these tiles."""
    rate = _rate(kernels, way)
    return min(
        _rounds(kernels, count * ceil(rows / height) * ceil(columns / width))
        * ((length + FIRST) * 2 * height * width / (rate * reached) + kernels.took(START))
        for height, width, reached in tiles
    )


def _rate(kernels: Kernels, way: int) -> float:
    """FLOPs a second of one multiprocessor."""
    spec = kernels.spec
    return spec.rates[FLOAT32] * kernels.achieved.product(FLOAT32) / spec.processors / _generation(kernels).longer[way]


def _rounds(kernels: Kernels, blocks: int) -> int:
    return ceil(blocks / kernels.spec.processors)


def _moving(kernels: Kernels, numbers: float) -> float:
    return 4 * numbers / kernels.bandwidth["memory"]
