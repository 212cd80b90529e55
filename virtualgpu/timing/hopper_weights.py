"""The gradient of a convolution's weight on a Hopper in 16 bits and TF32, of kernels larger than 1x1: how long cuDNN's kernels take.

It is a product of matrices, [made channels, positions] and [positions, read channels], for each place of the weight. Hopper's kernels
(sm90_xmma_wgrad_indexed_implicit_gemm in traces) cut it into tiles of one place each, and a multiprocessor sums up one tile after the
other, by steps along the positions (..segment_k_off); or all multiprocessors share the sums, where there are few tiles (..segment_k_on).
Weights with more places, or whose places lie further apart, are left to Ampere's kernels (cutlass_tensorop_..wgrad), two blocks of which
share a multiprocessor and whose parts another kernel adds up. cuDNN guesses which tiles are the fastest, and sometimes takes others.

All want the channels last, and an image that has them first is converted, and the gradient of the weight back.

From 992 convolutions on an H100 (cuDNN 9.19, torch.profiler, tests/gpu/h100_convolutions.csv): times, names and grids of the kernels.
"""

import math
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from virtualgpu.hardware.datasheet import BFLOAT16, FLOAT16, TF32
from virtualgpu.timing.kernels import Kernels

LEAST = 8  # channels: with fewer, images are filled up first
PLACES, REACH = 32, 16  # of the weight at most, and from the first of them to the last: else Ampere's


# A sum is shared by two multiprocessors or more, or by all where there are tiles for so many of them. More parts than so many are added by a
# kernel of its own. Tiles of two groups of warps are large ones
ALL, PARTS, LARGE = 0.8, 9, 256 * 128


class Tile(NamedTuple):
    """step: cycles of one along the sum. alone, shared: what cuDNN believes it to take over what it does, where sums are shared or not."""

    rows: int
    columns: int
    step: int
    alone: float = 1.0
    shared: float = 1.0


class Menu(NamedTuple):
    """Of a type. depth: positions of a step. Cycles before and after the steps: a pair is for a tile, and for each number of its edges."""

    tiles: tuple[Tile, ...]
    depth: int
    start: tuple[int, int]
    shared_start: tuple[int, int]  # with what a kernel before it prepares (init_device_workspace)
    shared_step: float  # over that of a tile by itself: all multiprocessors read
    persistent: float  # share of the multiprocessors that have a block, if there are more tiles
    powers: bool  # whether small tiles have 1, 2, 4 or 8 parts
    doubt: int  # cycles: cuDNN shares sums only where that many are won
    old: float  # what it believes Ampere's kernels to take over what they do

    def blocks(self, processors: int) -> int:
        """That take one tile after the other, where there are more of these than multiprocessors."""
        return int(self.persistent * processors)

    def parts(self, tile: Tile, tiles: int, processors: int) -> float | None:
        """Of one tile's sum, if it is shared; less than 1 where multiprocessors have several."""
        if 2 * tiles > processors:
            blocks = self.blocks(processors)
            return blocks / tiles if tiles > ALL * blocks else None
        parts = processors // tiles
        small = self.powers and parts <= PARTS and tile.rows * tile.columns < LARGE
        return 1 << (parts.bit_length() - 1) if small else parts


# 16 bits: what tensor cores take (a * b / 32 cycles) and a little more
HALVES = Menu(
    (
        Tile(64, 64, 217),
        Tile(64, 128, 323, shared=1.4),
        Tile(128, 64, 297, alone=1.4),
        Tile(64, 256, 670, shared=0.7),
        Tile(256, 64, 660, alone=0.7),
        Tile(128, 128, 598),
        Tile(128, 256, 1160, shared=0.7),
        Tile(256, 128, 1155),
    ),
    depth=64,
    start=(8400, 4),
    shared_start=(14500, 32),
    shared_step=1.14,
    persistent=10 / 11,
    powers=True,
    doubt=24000,
    old=2.0,
)
# TF32: wgmma takes numbers that do not lie along the sum in 16 bits alone (PTX ISA, wgmma.mma_async), and turning them round takes 4.5 cycles for
# each number of the edges, more than the tensor cores do
SINGLE = Menu(
    (
        Tile(64, 64, 620, 1.4, 1.1),
        Tile(64, 128, 980),
        Tile(128, 64, 845, shared=0.9),
        Tile(128, 128, 1220, 0.8, 1.1),
        Tile(256, 64, 1445),
    ),
    depth=32,
    start=(6000, 36),
    shared_start=(12500, 68),
    shared_step=1.0,
    persistent=1.0,
    powers=False,
    doubt=12000,
    old=1.1,
)
NEXT = 2000  # cycles between two tiles of a block
# Up to so many parts of a tile are added one after the other, and more by a kernel of its own (split_k_kernel): cycles for a part, and for that
# kernel, as above
PART, ADDING = 1000, (3000, 64)
BANDWIDTH = 0.85  # of memory's, what these kernels and those that convert reach


class Old(NamedTuple):
    """Of Ampere's. Columns: read channels times places. alone, pair: cycles of a step, of one block on a multiprocessor, and of two."""

    rows: int
    columns: int
    depth: int
    alone: int
    pair: int


OLD_HALVES = (
    Old(64, 64, 64, 990, 1540),
    Old(64, 128, 32, 625, 1250),
    Old(128, 64, 64, 1170, 2080),
    Old(128, 128, 32, 930, 1740),
    Old(256, 64, 32, 750, 1520),
    Old(256, 128, 32, 1290, 2500),
    Old(64, 32, 64, 435, 690),
    Old(32, 128, 32, 400, 830),
)
OLD_SINGLE = (
    Old(64, 64, 32, 860, 1270),
    Old(64, 128, 16, 665, 1190),
    Old(128, 128, 16, 930, 1820),
    Old(256, 64, 16, 805, 1560),
)
OLD_SPLITS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    10,
    13,
    17,
    20,
    26,
    35,
    52,
    70,
)  # parts, of OLD_STEPS or more, as the grids have them
# Cycles before and after; those of adding up; what their parts cost over writing them once; and what cuDNN's choice of them takes over the best
OLD_STEPS, OLD_START, OLD_ADDING, OLD_PARTS, MISSED = 4, 9900, 5000, 2.25, 1.2
# TF32 is rounded by a kernel of its own before Ampere's (convertTensor_kernel), channels last; else by that which converts. Cycles of it, and of one
# that converts (nchwToNhwcKernel): this has tiles of 32 channels and 32 places, some of them partly empty, of which a number takes MOVED
ROUNDING, CONVERTING, BLOCK, MOVED = 7000, 3000, 32, 0.33


class _Sum(NamedTuple):
    """The product: rows and columns for each of the places, summed up over the length. nbytes: of what is read."""

    rows: int
    columns: int
    places: int
    length: int
    nbytes: int


def taken(kernels: Kernels, weight: torch.Tensor, groups: int, key: str) -> bool:
    """Whether these kernels are."""
    on_tensor_cores = key in (FLOAT16, BFLOAT16, TF32)
    larger = weight.dim() == 4 and groups == 1 and prod(weight.shape[2:]) > 1
    return (
        kernels.spec.capability[0] == 9
        and not kernels.peak
        and on_tensor_cores
        and larger
        and min(weight.shape[:2]) >= LEAST
    )


def seconds(
    kernels: Kernels, made: torch.Tensor, read: torch.Tensor, weight: torch.Tensor, dilation: Sequence[int], key: str
) -> float:
    """Of the gradient of `weight` [made channels, read channels, *size]. made and read: the gradient and the image, or the other way
    round where the convolution is transposed."""
    places, length = prod(weight.shape[2:]), made.shape[0] * prod(made.shape[2:])
    product = _Sum(weight.shape[0], weight.shape[1], places, length, made.nbytes + read.nbytes)
    single, first = key == TF32, [image for image in (made, read) if image.stride(1) != 1]
    menu = SINGLE if single else HALVES
    reach = max((size - 1) * step for size, step in zip(weight.shape[2:], dilation, strict=False))
    rounding = 0.0
    if single and not first:
        rounding = sum(_rewriting(kernels, image.nbytes, ROUNDING) for image in (made, read))
    old = rounding + _by_amperes(kernels, product, single)
    guesses = [(menu.old * old, old)]
    if places <= PLACES and reach <= REACH:
        guesses += _by_hoppers(kernels, product, menu)
    if any(image is read for image in first):
        first.append(weight)
    return min(guesses)[1] + sum(_converting(kernels, image) for image in first)


def _by_hoppers(kernels: Kernels, product: _Sum, menu: Menu) -> Iterator[tuple[float, float]]:
    """What cuDNN believes each kernel to take, and what it does."""
    processors = kernels.spec.processors
    blocks = menu.blocks(processors)
    least = product.nbytes / (BANDWIDTH * kernels.bandwidth["memory"])
    for tile in menu.tiles:
        edges = tile.rows + tile.columns
        tiles = product.places * -(-product.rows // tile.rows) * -(-product.columns // tile.columns)
        rounds = 1 if tiles <= processors else -(-tiles // blocks)
        cycles = (
            menu.start[0]
            + menu.start[1] * edges
            + rounds * -(-product.length // menu.depth) * tile.step
            + (rounds - 1) * NEXT
        )
        own = max(least, kernels.took(cycles))
        yield tile.alone * own, own
        parts = menu.parts(tile, tiles, processors)
        if parts is None:
            continue
        cycles = (
            menu.shared_start[0]
            + menu.shared_start[1] * edges
            + product.length / menu.depth / parts * menu.shared_step * tile.step
        )
        cycles += ADDING[0] + ADDING[1] * edges if parts > PARTS else PART * parts
        own = max(least, kernels.took(cycles))
        yield tile.shared * own + kernels.took(menu.doubt), own


def _by_amperes(kernels: Kernels, product: _Sum, single: bool) -> float:
    """The best of them, and what cuDNN's choice takes over it."""
    best, pairs = math.inf, 2 * kernels.spec.processors
    result = 4 * product.rows * product.columns * product.places
    for tile in OLD_SINGLE if single else OLD_HALVES:
        tiles = -(-product.rows // tile.rows) * -(-product.columns * product.places // tile.columns)
        for parts in OLD_SPLITS:
            if parts > 1 and (product.length < OLD_STEPS * tile.depth * parts or tiles * parts > 4 * pairs):
                break
            full, left = divmod(tiles * parts, pairs)
            step = full * tile.pair + (tile.pair if 2 * left > pairs else tile.alone if left else 0)
            taken = kernels.took(OLD_START + -(-product.length // (tile.depth * parts)) * step)
            if parts > 1:
                taken += kernels.took(OLD_ADDING) + OLD_PARTS * parts * result / kernels.bandwidth["memory"]
            best = min(best, taken)
    return MISSED * best


def _converting(kernels: Kernels, image: torch.Tensor) -> float:
    """Its channels from first to last, or back."""
    filled = image.shape[0] * math.prod(-(-size // BLOCK) * BLOCK for size in (image.shape[1], prod(image.shape[2:])))
    return max(
        _rewriting(kernels, image.nbytes, CONVERTING), kernels.took(CONVERTING) + MOVED * filled / kernels.cycles
    )


def _rewriting(kernels: Kernels, nbytes: int, cycles: int) -> float:
    """A kernel that reads so many bytes and writes as many. Two of them follow each other, and the second one finds less in the cache."""
    moved = 2 * nbytes
    return kernels.took(cycles) + moved * kernels.from_memory(2 * moved) / (BANDWIDTH * kernels.bandwidth["memory"])
