"""How long one kernel lasts on a card: what its data sheet promises, times what kernels reach of it, for the size it has.

What multiplies (`flops`) or is bound by memory (`memory_bound`) asks it; what fits into the second-level cache is read from it. Times in seconds.
What kernels of a kind took on a card is in the tables of `data/`, which `python -m tests.gpu.tables` writes from files of measured kernels.

**Products of matrices** take the kernel that cuBLAS has for them, or cuDNN for a convolution. The result is cut into tiles, and a GPU works on a
wave of them at once, one a multiprocessor; the last wave is waited for (NVIDIA, "Matrix Multiplication Background User's Guide", wave and tile
quantization). Small tiles reach less than large ones, and each begins with a stretch in which nothing is multiplied yet. A sum may be split among
multiprocessors (split-K), whose parts another kernel adds up. One share a card (hardware/data/achieved.toml) and the same tiles for all find nine of ten
products within 30 % (`python -m tests.accuracy.kernels`).
"""

import csv
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from virtualgpu.hardware import specs
from virtualgpu.hardware.datasheet import FLOAT32, TF32, Spec

DATA = Path(__file__).parent / "data"
Row = Mapping[str, str]
# Data-center Blackwell, until one is measured: with an H100's medians KernelBench's convolutions on a B200 take 1.4 times what is simulated, without 2.5
LIKE = {"10.0": "9.0"}
ROW = 16  # bytes: what a row of a matrix should be a multiple of (NVIDIA, "Matrix Multiplication Background User's Guide")
# Cycles of a multiprocessor for each number that nchwToNhwcKernel moves: 12.8 million in 25 us on an H100, whose memory would bear more
REORDERED = 0.5
# What was just written is read from the second-level cache, and results stay there: such a kernel takes so much of the time that memory would
# need. It has two halves, and numbers begin to leave it before it is full: shares of its size (additions and activations in h100_profiled.csv)
CACHED, FULL, GONE = 0.53, 0.55, 1.2
STARTING = 0.5  # of a launch: the part that passes beside the first numbers of an elementwise kernel (the same)
FILLING = 0.5  # of a kernel's time at least, what one that fills takes: 0.9 to 1.1 us on an H100 (tests/gpu/h100_profiled.csv)


def vector_width(size: int, *widths: int) -> int:
    """How many numbers of `size` bytes one load takes, of matrices with rows of so many numbers; 0 where all are a multiple of ROW bytes."""
    shared = math.gcd(ROW, *(size * width for width in widths))
    return 0 if shared == ROW else shared // size


class Kind(NamedTuple):
    """Of an operation that is bound by memory: a row of data/memory_bound.csv.

    traffic: bytes really moved over those of all tensors that go in or come out, once; wide_traffic: the same where a row does not fit beside
    a multiprocessor, or 0. cycles: of a multiprocessor, for each number of the largest tensor, at least. limit: whose share of the bandwidth it
    has (`hardware/data/achieved.toml`). launches: its kernels. training: which argument says whether this is training. copied: which are copied first
    where they do not lie close. elementwise: each number comes of those at its own place. model: seconds by the card's kernels, the arguments
    and the tensors, of kernels whose threads are counted. step: cycles of a thread for each image and channel that it goes through.
    """

    traffic: float = 1.0
    wide_traffic: float = 0.0
    cycles: float = 0.0
    limit: str = "memory"
    launches: int = 1
    training: int | None = None
    copied: tuple[int, ...] = ()
    elementwise: bool = False
    model: Callable | None = None
    step: float = 0.0

    def evaluates(self, args) -> bool:
        """Is this call no training, of a kind that tells the two apart?"""
        return self.training is not None and not args[self.training]


class Product(NamedTuple):
    """`batch` products of [rows, length] and [length, columns]. key: into Spec.rates. moved: bytes, of all. vector_width: what kernels.vector_width
    says of the matrices. fraction: of what products reach of the peak. along: how many of the two matrices lie along the sum: both in a layer, one in
    the gradient of what went into it, none in that of its weight. bias: one is added. cublas: by its kernels, not by cuDNN's."""

    batch: int
    rows: int
    columns: int
    length: int
    key: str
    moved: float
    vector_width: int = 0
    fraction: float = 1.0
    along: int = 2
    bias: bool = False
    cublas: bool = True


def _both(sizes, fractions) -> tuple:
    """Tiles of these sizes, rows x columns, either way round, and what each reaches of the largest."""
    tiles = dict(zip(sizes, fractions, strict=True))
    return tuple((tiles | {(width, height): fraction for (height, width), fraction in tiles.items()}).items())


SIZES = (256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32)
TILES = _both(SIZES, (1.0, 1.0, 0.9, 0.8, 0.65, 0.5))
TENSOR_TILES = _both(SIZES, (1.0, 0.95, 0.75, 0.55, 0.35, 0.2))
# cuBLAS's for Hopper in 16 bits and less have a height of a few and any width (nvjet_.._192x96_.., _256x144_..), as far as two groups of warps
# hold the result (HELD numbers). They are bound by what they load, up to LOADED results for each number of the tile's edges; TENSOR_TILES say
# the same (0.95, 0.75, 0.55, 0.35 for 64, 43, 32, 21)
HELD, LOADED = 40960, 57
HOPPER_SIZES = [(h, w) for h in (64, 128, 192, 256) for w in range(32, 257, 32) if h * w <= HELD]
HOPPER_TILES = _both(HOPPER_SIZES, [min(1.0, h * w / (h + w) / LOADED) for h, w in HOPPER_SIZES])
SPLITS, PART = (1, 2, 4, 8, 16, 32), 64  # parts of the sum that several multiprocessors share; numbers of the shortest
# Numbers of the sum that the time before the first multiplication is worth: fitted to NeuSight's (float32), DeepBench's (V100 and T4) and our
# own products (Hopper: tests/gpu/h100_kernels.csv). A GeForce of Blackwell has no wgmma or tcgen05 (PTX ISA, target architectures): 64, too
FILL, TENSOR_FILL, HOPPER_FILL = 32, 64, 128
# Rows that are no multiple of 16 bytes are read in narrower loads, beside the multiplications: cycles of a multiprocessor for each number of a
# tile's edges. Of an odd length one number at a time: 1.67 ms for 16 x 248077 x 2560 in bfloat16 on an A100 (pegainfer,
# docs/models/qwen35/decode-kernel-attribution.md, 2026). Else: 130.56 us for 9477 x 1152 x 588 on an H100 at 1200 MHz (kestrel#143, 2026)
ODD_LOAD, NARROW_LOAD = 0.28, 0.16
# Such rows cannot go to wgmma or tcgen05, nor TF32 where neither matrix lies along the sum (PTX ISA, wgmma.mma_async). What mma.sync reaches of
# a Hopper's peak: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024
MMA_SYNC = 0.63
# Cycles for each number of the sum, in which a block waits in single precision (sm80_xmma_gemm_.._tilesize32x32x8: tests/gpu/h100_profiled.csv)
WAIT = 66


class Kernels:
    """Of one card. peak: at the data sheet's rates, for any size: a lower bound. known: what was asked before."""

    def __init__(self, spec: Spec, peak: bool = False):
        self.spec, self.peak = spec, peak
        self.achieved, limits = specs.achieved(spec), ("memory", "softmax", "layer_norm")
        self.bandwidth = {name: spec.bandwidth * (1.0 if peak else getattr(self.achieved, name)) for name in limits}
        self.cycles = spec.processors * spec.clock_rate * 1e3  # a second, of all
        self.clock, self.threads = 1e3 * spec.clock_rate, spec.limits.threads  # Hz; that a multiprocessor holds
        self.hopper = spec.capability[0] in (9, 10)  # or B200: products by groups of warps (wgmma, tcgen05)
        self.generation = "Hopper" if self.hopper else "before Hopper"  # as the tables of convolutions call it
        self.cache = 0 if peak else (spec.l2 or 0)
        self.known: dict = {}

    def moving(self, nbytes: float, kind: Kind, cycles: float = 0.0) -> float:
        """A kernel that is bound by memory. nbytes: of all tensors that it reads and writes, once. cycles: of a multiprocessor, in all, at least."""
        if self.peak:
            return self.spec.kernel + nbytes / self.spec.bandwidth
        moving = nbytes * kind.traffic * self.from_memory(nbytes) / self.bandwidth[kind.limit]
        seconds, launches = max(moving, cycles / self.cycles), kind.launches * self.spec.kernel
        return seconds + (launches - min(seconds, STARTING * launches) if kind.elementwise else launches)

    def working(self, nbytes: float, cycles: float, limit: str = "memory") -> float:
        """The longer of moving so many bytes and of so many cycles of all multiprocessors together, without a launch."""
        return max(cycles / self.cycles, self.streaming(nbytes, limit))

    def streaming(self, nbytes: float, limit: str = "memory") -> float:
        """Seconds that a kernel needs to move so many, once, without its launch. limit: whose share of the bandwidth it has."""
        return nbytes * self.from_memory(nbytes) / self.bandwidth[limit]

    def from_memory(self, nbytes: float) -> float:
        """What a kernel of so many bytes takes of the time that it would need without a second-level cache."""
        full, gone = FULL * self.cache, GONE * self.cache
        if full < nbytes < gone:
            return CACHED + (1 - CACHED) * (nbytes - full) / (gone - full)
        return CACHED if nbytes <= full else 1.0

    def lost(self, nbytes: float) -> float:
        """The share of what was written that the cache no longer has when so many bytes have passed it: none up to half of its size."""
        half = self.cache / 2
        return min(1.0, max(0.0, nbytes - half) / half) if half else 1.0

    def filling(self, nbytes: float) -> float:
        """A kernel that fills memory: no longer than it is launched, where there is little of it."""
        return FILLING * self.spec.kernel + self.streaming(nbytes)

    def took(self, cycles: float) -> float:
        """Seconds of that many cycles of a multiprocessor."""
        return cycles / self.clock

    def reordering(self, image) -> float:
        """A kernel that reads an image and writes it with its channels elsewhere."""
        moving = 2 * image.nbytes / self.bandwidth["memory"]
        return self.spec.kernel + max(moving, REORDERED * image.numel() / self.cycles)

    def plain(self, flops: float, moved: float, key) -> float:
        """A kernel of which no more is known than these: at the share of large products, or of memory."""
        rate = self.spec.rates.get(key, self.spec.rates[FLOAT32]) * (1.0 if self.peak else self.achieved.product(key))
        return self.spec.kernel + max(flops / rate, moved / self.bandwidth["memory"])

    def multiplying(
        self, count: int, rows: int, columns: int, length: int, key, moved: float, fraction: float
    ) -> float:
        """`count` products by one of cuDNN's kernels, for a convolution that moves so many bytes; without its launch. key: into Spec.rates.
        fraction: of what products reach of the peak."""
        return self.busy(Product(count, rows, columns, length, key, moved, fraction=fraction, cublas=False))

    def busy(self, product: Product) -> float:
        """Seconds of a product of matrices, without the first launch."""
        spec = self.spec
        peak = spec.rates.get(product.key, spec.rates[FLOAT32])
        flops = 2.0 * product.batch * product.rows * product.columns * product.length
        if self.peak or not flops:
            return max(flops / peak, product.moved / spec.bandwidth)
        return max(self._tiled(product, peak), product.moved / self.bandwidth["memory"])

    def _tiled(self, product: Product, peak: float) -> float:
        """By the best tiles and parts."""
        spec, key, cublas = self.spec, product.key, product.cublas
        batch, rows, columns, length = product[:4]
        processors, cycle, best = spec.processors, self.took(1), math.inf
        tensor_cores = peak > spec.rates[FLOAT32] or (key == TF32 and key in spec.rates)
        narrow = tensor_cores and bool(product.vector_width)
        across = tensor_cores and self.hopper and cublas and key == TF32 and product.along == 0
        warp_groups = tensor_cores and self.hopper and not narrow and not across
        rate = peak * product.fraction * self.achieved.product(key)
        if self.hopper and (across or narrow):
            rate = rate * MMA_SYNC if across else min(rate, peak * MMA_SYNC)
        fill = FILL if not tensor_cores else HOPPER_FILL if warp_groups else TENSOR_FILL
        load = cycle * (ODD_LOAD if product.vector_width == 1 else NARROW_LOAD) if narrow else 0.0
        wait = cycle * WAIT if cublas and spec.capability[0] >= 8 and not tensor_cores else 0.0
        splits = SPLITS[:1] if wait and product.bias else SPLITS  # few kernels that add a bias split the sum
        nvjet = warp_groups and cublas and spec.capability[0] == 9 and key != TF32
        written = 4 * batch * rows * columns / spec.bandwidth  # parts are written, read and added up
        for (height, width), reached in HOPPER_TILES if nvjet else TENSOR_TILES if tensor_cores else TILES:
            blocks = batch * -(-rows // height) * -(-columns // width)
            step = max(2 * height * width * processors / (rate * reached), load * (height + width))
            for parts in splits:
                if parts > 1 and (length < PART * parts or blocks * parts > 2 * processors):
                    break
                part = -(-length // parts)
                took = max(_waves(blocks * parts / processors) * step * (part + fill), wait * part)
                best = min(best, took + (written * (parts + 1) + spec.kernel if parts > 1 else 0.0))
        return best


def _waves(filled: float) -> float:
    """How many are waited for; filled: by the tiles that there are. Of what the last one leaves empty a half is lost, nearest to the kernels and to
    published times over the batch (`python -m tests.accuracy.batch_sweeps`): its tiles have a multiprocessor to themselves."""
    return max(1.0, (math.ceil(filled) + filled) / 2)


def measured_rows(table: str, spec: Spec, *columns: str) -> Mapping[tuple[str, ...], Row]:
    """data/TABLE.csv by what stands in these columns: the rows of that card, or else of the first of its compute capability; none where neither
    was measured."""
    capability = ".".join(map(str, spec.capability))
    for wanted in (capability, LIKE.get(capability)):
        like = {name: rows for (name, number), rows in _cards(table, columns).items() if number == wanted}
        if like:
            return like.get(spec.name) or next(iter(like.values()))
    return {}


@functools.cache
def _cards(table: str, columns: tuple[str, ...]) -> dict[tuple[str, str], dict[tuple[str, ...], Row]]:
    """By card and capability, in the order of the file."""
    cards: dict[tuple[str, str], dict[tuple[str, ...], Row]] = {}
    for row in read_table(table):
        cards.setdefault((row["card"], row["capability"]), {})[tuple(row[name] for name in columns)] = row
    return cards


def read_table(table: str) -> list[dict[str, str]]:
    """data/TABLE.csv, row by row."""
    with open(DATA / f"{table}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
