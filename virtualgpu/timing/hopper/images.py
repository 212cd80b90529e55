"""Convolutions that make an image on a Hopper's tensor cores, forward or as the gradient of what went in: how long cuDNN's kernels take.

Those of kernels larger than 1x1, without groups, that read at least 8 channels. Three dimensions go by the same rules, of which they were no part.

Such a convolution is a product of matrices (implicit GEMM): rows are the places of the image that is made, columns its channels, and the sum
runs over the channels read, for each tap of the kernel. It is cut into tiles. A multiprocessor goes step by step along the sum of one,
writes it, and takes the next; the last round is waited for. The gradient of a convolution with strides has kernels of its own, which do
the places of each remainder apart, with the taps that meet them. Which kernel is taken cuDNN guesses: here it is the one of the shortest
time, times a factor for each kernel, by which cuDNN seems to misjudge it.

All want the channels last: images and weights that have them first are reordered before, and the result after.

From 1984 convolutions on an H100 (cuDNN 9.19, PyTorch 2.11, torch.profiler, which names each kernel and its tiles;
tests/gpu/h100_convolutions.csv): cycles of a multiprocessor by those that take the kernel, factors by three quarters of all. Of 120 others, which
nothing here was fitted to (tests/gpu/h100_profiled.csv), 68 % are within 15 % and 84 % within 30 %. What stays off is mostly a kernel far
from the best, which cuDNN takes for no reason that sizes tell.
"""

from math import ceil, prod
from typing import NamedTuple

from torch import Tensor

from virtualgpu.timing.hopper import reordering
from virtualgpu.timing.hopper.convolution import Convolution
from virtualgpu.timing.hopper.reordering import is_first
from virtualgpu.timing.kernels import Kernels

# Hopper's kernels let the Tensor Memory Accelerator read, up to so many taps and places from the first to the last; 7x7 and dilated by 8
# and more are left to others. Those for strides, which look places up (indexed), take any taps, but no such dilation
TAPS, REACH, DILATION = 32, 15, 8
# Numbers of 32 bits take so much longer to write
WIDER = 1.5
# Where multiprocessors share the steps of all tiles evenly (stream-K): steps that each one has at least, and cycles for each number of a tile
# whose parts are added up
SHARED_STEPS, ADDING = 20, 1.0
# Ampere's kernels want their numbers rounded to TF32 before. Reordering does so; else convertTensor_kernel does: beginning and end, and what it
# takes over others from memory
ROUNDED, ROUNDED_MOVING = 7000, 1.2


class Kind(NamedTuple):
    """start: cycles at the beginning and the end. number: for each of a tile, to write it. busy: the share of the multiprocessors at work, which
    clusters of several don't all fit. clears: a kernel clears a counter before, by which multiprocessors take their next tiles."""

    start: int
    number: float
    busy: float
    clears: bool


TMA = Kind(10000, 0.1, 0.955, True)  # sm90_xmma_.._warpgroupsize1x1x1_..
STRIDED = Kind(12000, 0.15, 0.91, True)  # sm90_xmma_dgrad_implicit_gemm_indexed_.._strided
CUTLASS = Kind(5000, 0.2, 1.0, False)  # cutlass_tensorop_..s16816.. and s1688: Ampere's
XMMA = Kind(6000, 0.3, 1.0, False)  # sm80_xmma_..: the same


class Tile(NamedTuple):
    """rows, columns, depth: of one step. step: its cycles; of several blocks that run side by side, for each. guess: the factor for cuDNN's choice.
    shared: multiprocessors share the sums (segment_k_on). first: it writes the result with its channels first (nhwckrsc_nchw)."""

    kind: Kind
    rows: int
    columns: int
    depth: int
    step: int
    guess: float
    shared: bool = False
    first: bool = False


OF_AMPERE = (
    Tile(CUTLASS, 128, 128, 32, 538, 1.0),
    Tile(CUTLASS, 128, 64, 32, 442, 1.0),
    Tile(CUTLASS, 64, 64, 32, 304, 1.0),
    Tile(XMMA, 64, 32, 64, 362, 1.1),
)
OF_HALVES = (
    Tile(TMA, 128, 128, 64, 604, 0.8),
    Tile(TMA, 128, 256, 64, 1270, 0.9),
    Tile(TMA, 256, 64, 32, 498, 0.8),
    Tile(TMA, 64, 128, 64, 333, 1.0),
    Tile(TMA, 64, 64, 64, 202, 1.1),
    *OF_AMPERE,
)
OF_SINGLE = Tile(CUTLASS, 256, 64, 16, 627, 0.7)
# In 16 bits, and in TF32
HALVES = {
    "forward": OF_HALVES,
    "image": (*OF_HALVES, Tile(STRIDED, 128, 128, 64, 727, 1.0)),
    "strided": (Tile(STRIDED, 256, 128, 64, 1372, 0.7), Tile(STRIDED, 256, 64, 32, 742, 0.7), *OF_AMPERE),
}
SINGLE = {
    "forward": (
        Tile(TMA, 128, 128, 32, 610, 0.6),
        Tile(TMA, 64, 64, 32, 218, 0.8),
        Tile(TMA, 128, 64, 32, 570, 0.6, shared=True),
        Tile(XMMA, 128, 128, 16, 551, 0.7, first=True),
        OF_SINGLE,
    ),
    "image": (
        Tile(TMA, 128, 64, 32, 560, 0.5),
        Tile(TMA, 128, 128, 32, 680, 0.5, shared=True),
        Tile(STRIDED, 128, 64, 32, 499, 1.0),
        OF_SINGLE,
    ),
    "strided": (Tile(STRIDED, 256, 64, 32, 742, 1.3), OF_SINGLE),
}


def seconds(kernels: Kernels, convolution: Convolution) -> float:
    """Forward, or of the gradient of the image, with its launches."""
    made, read, weight = convolution.made, convolution.image, convolution.weight
    if convolution.way == "image":
        made, read = read, made
    strided = convolution.way == "image" and max(convolution.stride) > 1
    menu = (SINGLE if made.itemsize == 4 else HALVES)["strided" if strided else convolution.way]
    moving = kernels.streaming(made.nbytes + read.nbytes + weight.nbytes)
    before = sum(reordering.seconds(kernels, tensor) for tensor in (read, weight) if is_first(tensor))
    after = reordering.seconds(kernels, made) if is_first(made) else 0.0
    rounding = sum(_rounding(kernels, tensor) for tensor in (read, weight) if not is_first(tensor))

    def total(tile: Tile) -> float:
        prepared = before + (0.0 if tile.first else after) + (rounding if tile.kind in (CUTLASS, XMMA) else 0.0)
        return prepared + max(moving, _multiplying(kernels, tile, made, read, convolution))

    able = [tile for tile in menu if _able(tile, made, convolution)]
    return total(min(able, key=lambda tile: tile.guess * total(tile)))


def _able(tile: Tile, made: Tensor, convolution: Convolution) -> bool:
    """Can this kernel do it?"""
    if tile.first and not is_first(made):
        return False
    if tile.kind is STRIDED:
        return max(convolution.dilation) < DILATION
    return tile.kind is not TMA or (convolution.taps <= TAPS and convolution.reach <= REACH)


def _multiplying(kernels: Kernels, tile: Tile, made: Tensor, read: Tensor, convolution: Convolution) -> float:
    """The kernel itself, as far as the multiprocessors bound it."""
    kind = tile.kind
    parts = prod(convolution.each(convolution.stride)) if kind is STRIDED else 1
    places, numbers = made.shape[0] * prod(made.shape[2:]), tile.rows * tile.columns
    tiles = parts * ceil(places / parts / tile.rows) * ceil(made.shape[1] / tile.columns)
    steps = convolution.taps / parts * ceil(read.shape[1] / tile.depth)
    writing = kind.number * numbers * (WIDER if made.itemsize == 4 else 1.0)
    at_once = int(kind.busy * kernels.spec.processors)
    if tile.shared:
        at_once = min(at_once, max(1, int(tiles * steps / SHARED_STEPS)))
        cycles = tiles * steps / at_once * tile.step + ceil(tiles / at_once) * writing + ADDING * numbers
    else:
        cycles = ceil(tiles / at_once) * (steps * tile.step + writing)
    clearing = kernels.filling(0) if kind.clears and not tile.shared and tiles > at_once else 0.0
    return clearing + kernels.took(kind.start + cycles)


def _rounding(kernels: Kernels, tensor: Tensor) -> float:
    """A kernel that reads float32 and writes TF32 (convertTensor_kernel); none for 16 bits."""
    if tensor.itemsize == 2:
        return 0.0
    return kernels.took(ROUNDED) + ROUNDED_MOVING * kernels.streaming(2 * tensor.nbytes)
