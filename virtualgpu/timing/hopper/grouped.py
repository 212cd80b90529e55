"""Grouped convolutions on a Hopper, more than one channel a group, in 16 bits or TF32 (cuDNN's kernels "tilesize64x64x64_.._g4").

Narrow groups are done side by side as one of a tile's width, zeros between them; others are filled up to a tile's. The kernels want the channels last: images that
have them first are converted before and after. Widths that are no power of two have no kernel of their own: images are filled up with zeros and cut again.

From 360 convolutions of 3x3 on an H100 (cuDNN 9.19, torch.profiler: tests/gpu/h100_convolutions.csv). Not in here: where cuDNN takes one kernel
for each group, 3 to 30 times as long, mostly of a gradient; nothing in their sizes tells when.
"""

from virtualgpu.hardware.datasheet import TF32
from virtualgpu.timing.hopper import reordering
from virtualgpu.timing.hopper.convolution import Convolution, Sizes
from virtualgpu.timing.kernels import Kernels

# Widths of tiles, and multiplications a cycle of a multiprocessor with them, zeros counted as well: in 16 bits and TF32. Of up to 8 channels a group fewer
TILES = {False: ((64, 830), (128, 1250)), True: ((32, 210), (64, 320), (128, 400))}
NARROW, NARROW_SHARE = 8, 0.7
LEAST = 4  # channels a group: fewer are filled up
# What the gradient of a strided convolution's image reaches of 64 wide tiles (it is done for all places of the image), and that of the weight
STRIDED, WEIGHT = {False: 600, True: 190}, {False: 680, True: 175}
WIDE = 64
# Cycles before and after, in 16 bits and TF32
START = {"forward": (4000, 8000), "image": (5000, 12000), "weight": (14000, 24000)}
BESIDE = 3  # multiplying and moving pass side by side, though not wholly: their times are added as powers
# The same in groups that are filled up or cut, channels first: cycles for each number, and more for what comes from memory; tensorTransformGeneric, which fills up or cuts images with the channels
# last, and weights: in all, and for each number. convertTensor_kernel, before TF32's gradient of a weight: over what memory needs
CONVERTED, CONVERTED_FROM_MEMORY = 0.2, 0.26
TRANSFORMING, TRANSFORMED = 16000, 2.15
ROUNDED = 1.25


class Grouped(Sizes):
    """One of these."""

    @property
    def width(self) -> int:
        """Channels of a group, the most of both sides."""
        return max(self.read, self.made, LEAST * self.groups) // self.groups

    @property
    def uneven(self) -> bool:
        """No power of two."""
        return bool(self.width & (self.width - 1))

    @property
    def odd(self) -> bool:
        """Without a kernel of its own."""
        return self.uneven or max(self.read, self.made) < LEAST * self.groups

    @property
    def numbers(self) -> tuple[int, int]:
        """Of the image read, and made."""
        return self.images * self.places * self.read, self.images * self.places_made * self.made


def seconds(kernels: Kernels, convolution: Convolution) -> float:
    """With its launches."""
    of = Grouped(*convolution.sizes)
    multiplying = kernels.took(START[of.way][of.key == TF32]) + _products(of) / _rate(of) / kernels.cycles
    moving = kernels.streaming(of.size * sum(of.numbers))
    busy = (multiplying**BESIDE + moving**BESIDE) ** (1 / BESIDE)
    return kernels.spec.kernel + busy + _around(kernels, of)


def _tile(of: Grouped) -> tuple[int, int]:
    """Its width, and multiplications a cycle."""
    tiles = TILES[of.key == TF32]
    return next(
        (tile for tile in tiles if of.width <= tile[0]), (-(-of.width // tiles[-1][0]) * tiles[-1][0], tiles[-1][1])
    )


def _wide(of: Grouped) -> int:
    """Channels that a tile of theirs has."""
    strided = of.way == "image" and of.places > of.places_made
    return max(WIDE, _tile(of)[0]) if strided or of.way == "weight" else _tile(of)[0]


def _products(of: Grouped) -> float:
    """Multiplications, zeros counted."""
    wide = _wide(of)
    merged = of.groups if of.uneven or of.width >= wide else -(-of.groups * of.width // wide)
    places = of.places if of.way == "image" else of.places_made
    return float(of.images) * places * merged * wide * wide * of.kernel


def _rate(of: Grouped) -> float:
    """Multiplications a cycle."""
    if of.way == "weight":
        return WEIGHT[of.key == TF32]
    if of.way == "image" and of.places > of.places_made:
        return STRIDED[of.key == TF32]
    share = NARROW_SHARE if of.width <= NARROW and of.key != TF32 else 1.0
    return _tile(of)[1] * share


def _around(kernels: Kernels, of: Grouped) -> float:
    """The kernels that bring images into shape, and the weight."""
    filled = _tile(of)[0] / of.width if of.uneven else 1.0
    total = sum(_converting(kernels, of, numbers, filled) for numbers in of.numbers)
    if of.odd:
        total += kernels.spec.kernel + kernels.took(TRANSFORMING)
    return total + (kernels.spec.kernel if total and not of.last else 0.0)


def _converting(kernels: Kernels, of: Grouped, numbers: int, filled: float) -> float:
    """One image."""
    moved, launch = 2 * of.size * numbers, kernels.spec.kernel
    if not of.last and not of.odd:
        return reordering.of_numbers(kernels, numbers, of.size)
    if not of.last:
        each = CONVERTED + CONVERTED_FROM_MEMORY * kernels.from_memory(moved)
        clearing = kernels.filling(of.size * numbers * filled)
        return launch + clearing + max(kernels.streaming(moved), each * numbers * filled / kernels.cycles)
    if of.odd:
        transforming = kernels.took(TRANSFORMING) + TRANSFORMED * numbers / kernels.cycles
        return kernels.filling(of.size * numbers * filled) + transforming
    return launch + ROUNDED * kernels.streaming(moved) if of.way == "weight" and of.key == TF32 else 0.0
