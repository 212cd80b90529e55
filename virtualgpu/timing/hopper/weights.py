"""The gradient of a convolution's weight on a Hopper, in 16 bits and TF32, of kernels larger than 1x1: how long cuDNN's kernels take.

It is a product of matrices, [made channels, positions] and [positions, read channels], for each place of the weight. Hopper's kernels
(sm90_xmma_wgrad_indexed_implicit_gemm in traces) cut it into tiles of one place each, and a multiprocessor sums up one tile after the
other, by steps along the positions (..segment_k_off); or all multiprocessors share the sums (..segment_k_on). Weights with more places, or
whose places lie further apart, are left to Ampere's kernels (cutlass_tensorop_..wgrad, sm80_xmma_wgrad_..): two blocks of them share a
multiprocessor, and another kernel adds up the parts of a sum. Which tiles are the fastest cuDNN guesses, and is sometimes wrong.

All want the channels last: an image that has them first is converted, and the gradient of the weight back.

From 744 convolutions on an H100 (cuDNN 9.19, torch.profiler, tests/gpu/h100_convolutions.csv), their times and the names and grids of their
kernels; of 248 others 82 % are within 30 %. Not found out is when cuDNN takes kernels without tensor cores (wgrad_alg1_engine), ten
times as long, for 12 of 60 of those that are left to Ampere's in 16 bits.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from virtualgpu.hardware.datasheet import TF32
from virtualgpu.timing.hopper import reordering
from virtualgpu.timing.hopper.convolution import Convolution
from virtualgpu.timing.kernels import Kernels

PLACES, REACH = 32, 16  # of the weight at most, and from the first of them to the last, of Hopper's kernels
# In 16 bits: with fewer channels, made and read, all is left to Ampere's; of more tiles than multiprocessors these have so many blocks; and
# small tiles have 1, 2, 4 or 8 parts of a sum
FEW, USED = 64, 10 / 11
# A sum is shared by two multiprocessors or more; or by all, where there are tiles for so many of them. A part costs as many cycles as PART, or, where
# there are more than PARTS, a kernel of its own adds them up (split_k_kernel): cycles for a tile, and for each number of its edges. Tiles of
# two groups of warps are large
ALL, PARTS, LARGE, PART, ADDING = 0.8, 9, 256 * 128, 1000, (3000, 64)
NEXT = 2000  # cycles between two tiles that follow one another on a multiprocessor
BANDWIDTH = 0.85  # of what others reach of memory's
# Of Ampere's: into how many parts sums are cut, of how many steps at least; cycles before and after, and of adding up, at all and for
# each part; what the parts take over writing them once; and what cuDNN's choice takes over the best
OLD_PARTS, OLD_STEPS, OLD_START = (1, 2, 3, 5, 8, 13, 20), 4, 10000
OLD_ADDING, OLD_MOVED, MISSED = (5000, 200), 2.25, 1.1
# Channels last, TF32 is rounded before Ampere's kernels (convertTensor_kernel): cycles, at all
ROUNDING = 7000


class Tile(NamedTuple):
    """step: cycles of one along the sum. alone, shared: what cuDNN believes it to take over what it does, by itself or with shared sums."""

    rows: int
    columns: int
    step: int
    alone: float = 1.0
    shared: float = 1.0


class Old(NamedTuple):
    """Of Ampere's, with all places beside one another in the columns. step, pair: cycles of one block on a multiprocessor, and of two."""

    rows: int
    columns: int
    depth: int
    step: int
    pair: int


class Menu(NamedTuple):
    """Of a type. depth: positions of a step. start, shared_start: cycles before and after, for a tile and for each number of its edges."""

    tiles: tuple[Tile, ...]
    depth: int
    start: tuple[int, int]
    shared_start: tuple[int, int]  # with the kernel before it (init_device_workspace)
    shared_step: float  # over that of a tile by itself
    doubt: int  # cycles that sharing has to win at least before cuDNN does it
    olds: tuple[Old, ...]
    halves: bool

    def blocks(self, processors: int) -> int:
        """Of how many multiprocessors, where there are more tiles."""
        return int(USED * processors) if self.halves else processors

    def parts(self, tile: Tile, tiles: int, processors: int) -> float:
        """Of one tile's sum, if it is shared; less than 1 where multiprocessors have several; 0 if it is not."""
        if 2 * tiles > processors:
            blocks = self.blocks(processors)
            return blocks / tiles if tiles > ALL * blocks else 0
        parts = processors // tiles
        small = self.halves and parts <= PARTS and tile.rows * tile.columns < LARGE
        return 1 << (parts.bit_length() - 1) if small else parts


# What tensor cores take, rows x columns / 32, and a little more
HALVES = Menu(
    tiles=(
        *(Tile(64, 64, 217), Tile(64, 128, 323, shared=1.4), Tile(128, 64, 297, alone=1.4), Tile(128, 128, 598)),
        *(Tile(64, 256, 670, shared=0.7), Tile(256, 64, 660, alone=0.7)),
        *(Tile(128, 256, 1160, shared=0.7), Tile(256, 128, 1155)),
    ),
    depth=64,
    start=(8400, 4),
    shared_start=(14500, 32),
    shared_step=1.14,
    doubt=24000,
    olds=(Old(64, 64, 64, 990, 1540), Old(256, 128, 32, 1290, 2500), Old(32, 128, 32, 400, 830)),
    halves=True,
)
# wgmma takes TF32 only where it lies along the sum (PTX ISA, wgmma.mma_async), and turning it round takes 4.5 cycles for each number of
# the edges, more than tensor cores do
SINGLE = Menu(
    tiles=(
        *(Tile(64, 64, 620, alone=1.4, shared=1.1), Tile(64, 128, 980), Tile(128, 64, 845, shared=0.9)),
        *(Tile(128, 128, 1220, alone=0.8, shared=1.1), Tile(256, 64, 1445)),
    ),
    depth=32,
    start=(6000, 36),
    shared_start=(12500, 68),
    shared_step=1.0,
    doubt=12000,
    olds=(Old(64, 64, 32, 860, 1270), Old(128, 128, 16, 930, 1820), Old(256, 64, 16, 805, 1560)),
    halves=False,
)


class Sum(NamedTuple):
    """The product: [rows, length] and [length, columns] for each of the places. nbytes: of what is read."""

    rows: int
    columns: int
    places: int
    length: int
    nbytes: int


def seconds(kernels: Kernels, convolution: Convolution) -> float:
    """With its launches."""
    made, read, weight, key = convolution.made, convolution.image, convolution.weight, convolution.key
    menu = SINGLE if key == TF32 else HALVES
    rows, columns, places = weight.shape[0], weight.shape[1], convolution.taps
    length = made.shape[0] * math.prod(made.shape[2:])
    product = Sum(rows, columns, places, length, made.nbytes + read.nbytes)
    first = [image for image in (made, read) if reordering.is_first(image)]
    old = _by_amperes(kernels, product, menu)
    if key == TF32 and not first:
        old += sum(_rewriting(kernels, image.nbytes, ROUNDING) for image in (made, read))
    guesses = [(old, old)]
    few = menu.halves and max(rows, columns) < FEW
    if not few and places <= PLACES and convolution.reach <= REACH:
        guesses += _by_hoppers(kernels, product, menu)
    if any(image is read for image in first):
        first.append(weight)
    return min(guesses)[1] + sum(reordering.seconds(kernels, image) for image in first)


def _by_hoppers(kernels: Kernels, product: Sum, menu: Menu) -> Iterator[tuple[float, float]]:
    """What cuDNN believes each of them to take, and what it does."""
    processors, steps = kernels.spec.processors, product.length / menu.depth
    least = product.nbytes / (BANDWIDTH * kernels.bandwidth["memory"])
    for tile in menu.tiles:
        edges, tiles = tile.rows + tile.columns, product.places * _tiles(tile, product.rows, product.columns)
        rounds = 1 if tiles <= processors else -(-tiles // menu.blocks(processors))
        cycles = menu.start[0] + menu.start[1] * edges + rounds * (math.ceil(steps) * tile.step + NEXT) - NEXT
        alone = max(least, kernels.took(cycles))
        yield tile.alone * alone, alone
        if parts := menu.parts(tile, tiles, processors):
            added = ADDING[0] + ADDING[1] * edges if parts > PARTS else PART * parts
            summing = steps / parts * menu.shared_step * tile.step
            shared = max(least, kernels.took(menu.shared_start[0] + menu.shared_start[1] * edges + summing + added))
            yield tile.shared * shared + kernels.took(menu.doubt), shared


def _by_amperes(kernels: Kernels, product: Sum, menu: Menu) -> float:
    """What cuDNN's choice of them takes."""
    best, pairs = math.inf, 2 * kernels.spec.processors
    rows, columns = product.rows, product.columns * product.places
    for tile in menu.olds:
        tiles = _tiles(tile, rows, columns)
        for parts in OLD_PARTS:
            if parts > 1 and (product.length < OLD_STEPS * tile.depth * parts or tiles * parts > 4 * pairs):
                break
            full, left = divmod(tiles * parts, pairs)
            step = full * tile.pair + (tile.pair if 2 * left > pairs else tile.step if left else 0)
            one = kernels.took(OLD_START + -(-product.length // (tile.depth * parts)) * step)
            if parts > 1:
                moved = OLD_MOVED * parts * 4 * rows * columns
                one += kernels.took(OLD_ADDING[0] + OLD_ADDING[1] * parts) + moved / kernels.bandwidth["memory"]
            best = min(best, one)
    return MISSED * best


def _tiles(tile: Tile | Old, rows: int, columns: int) -> int:
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def _rewriting(kernels: Kernels, nbytes: int, cycles: int) -> float:
    """A kernel that reads so many bytes and writes as many, as does another one beside it: the cache is for both."""
    moved = 2 * nbytes
    return kernels.took(cycles) + moved * kernels.from_memory(2 * moved) / (BANDWIDTH * kernels.bandwidth["memory"])
