"""How long one kernel lasts on a card: what its data sheet promises, times what kernels reach of it, for the size it has.

**Products** are cut into tiles, and a GPU works on as many at once as it has multiprocessors: what is left over after the last full
round is waited for (NVIDIA, "Matrix Multiplication Background User's Guide", wave and tile quantization). Small tiles reach less than
large ones, and each begins with a stretch in which nothing is multiplied yet. One share a card (hardware.achieved), with tiles and their
shares alike for all, finds nine of ten of NeuSight's and DeepBench's products within 30 %.

**Convolutions** are products of the same kind (`convolutions`).

**Everything else** is bound by memory, by the bytes that the kernel really moves. What fits into the second-level cache is read from it.
A batch norm is bound by its blocks (`batch_norms`).

All times in seconds.
"""

import math

from virtualgpu.hardware import achieved
from virtualgpu.hardware.datasheet import FLOAT32, TF32, Spec
from virtualgpu.timing.kinds import Kind

# rows x columns of a tile, and what it reaches of the largest; the same for all cards
TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.8), (64, 32, 0.65), (32, 32, 0.5))
TENSOR_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.75), (64, 64, 0.55), (64, 32, 0.35), (32, 32, 0.2))
SPLITS = (1, 2, 4, 8, 16, 32)  # parts of the sum that several multiprocessors share
# of the sum's length, what the time before the first multiplication is worth: fitted to NeuSight's (float32), DeepBench's (V100 and T4)
# and our own products (Hopper: tests/gpu/h100_kernels.csv, 302 of 16 bits and TF32). A GeForce of Blackwell has Ampere's instructions, no wgmma or tcgen05 (PTX
# ISA, target architectures): its products of 2048 say 64, too
FILL, TENSOR_FILL, HOPPER_FILL = 32, 64, 128
ROW = 16  # bytes: what a row of a matrix should be a multiple of (the same guide)
# Other rows are read in narrower loads, beside the multiplications: cycles of a multiprocessor for each
# number of a tile's edges. Of an odd length one number at a time: 1.67 ms for 16 x 248077 x 2560 in bfloat16 on an A100, 128 x 64 tiles
# (pegainfer, docs/models/qwen35/decode-kernel-attribution.md, 2026). Else: 130.56 us for 9477 x 1152 x 588 on an H100 at 1200 MHz
# (kestrel, pull request 143, 2026). Where the tensor cores take longer, nothing is lost: DeepBench's on V100 and T4 (lengths of 1530),
# pytorch#181718's on an RTX 4090 (2055)
ODD_LOAD, NARROW_LOAD = 0.26, 0.16
# Such rows cannot go to wgmma or tcgen05; what mma.sync reaches of a Hopper's peak: Luo et al., "Benchmarking and Dissecting the Nvidia
# Hopper GPU Architecture via Microbenchmarking", 2024
MMA_SYNC = 0.63
WAVE = 4  # up to so many rounds the last one is waited for; beyond that, half of one on average
# Cycles of a multiprocessor for each number that nchwToNhwcKernel moves: 12.8 million in 25 us on an H100, whose memory would bear more
REORDERED = 0.5
# What was just written is read from the second-level cache, and results stay there: such a kernel takes so much of the time that memory
# would need. It has two halves, and numbers begin to leave it before it is full: shares of its size (tests/gpu/h100_profiled.csv,
# additions and activations)
CACHED, FULL, GONE = 0.53, 0.55, 1.2
STARTING = 0.5  # of a launch: the part that passes beside the first numbers of an elementwise kernel (the same)
FILLING = 0.5  # of a kernel's time at least, what one that fills takes: 0.9 to 1.1 us on an H100 (tests/gpu/h100_profiled.csv)
FROM_CACHE = (
    0.5  # of the time, what reading from the cache saves at most: 5.5 TB/s of an H100's 3.35 (sums of 16 MiB there)
)


def together(size: int, *widths: int) -> int:
    """How many numbers of `size` bytes one load takes, of matrices with rows of so many numbers; 0 where all are a multiple of ROW bytes."""
    shared = math.gcd(ROW, *(size * width for width in widths))
    return 0 if shared == ROW else shared // size


class Kernels:
    """Of one card. peak: at the data sheet's rates, for any size: a lower bound.

    What was asked before is remembered, in `known`.
    """

    def __init__(self, spec: Spec, peak: bool = False):
        self.spec, self.peak = spec, peak
        self.achieved = reached = achieved.of(spec)
        share = {"memory": reached.memory, "softmax": reached.softmax, "layer_norm": reached.layer_norm}
        self.bandwidth = {name: spec.bandwidth * (1.0 if peak else part) for name, part in share.items()}
        self.cycles = spec.processors * spec.clock_rate * 1e3  # a second, of all
        self.hopper = spec.capability[0] in (9, 10)  # or B200: products by groups of warps (wgmma, tcgen05)
        self.generation = "Hopper" if self.hopper else "before Hopper"  # as the tables of convolutions call it
        self.cache = 0 if peak else (spec.l2 or 0)
        self.known: dict = {}

    def moving(self, nbytes: float, kind: Kind, args=()) -> float:
        """A kernel that is bound by memory. nbytes: of all tensors that it reads and writes, once. args: the operation's, for a kind
        that takes a while at least."""
        spec = self.spec
        if self.peak:
            return spec.kernel + nbytes / spec.bandwidth
        if kind.own is not None and kind.call and (seconds := kind.own(self, *kind.call)) is not None:
            return seconds
        bandwidth, beyond = self.bandwidth[kind.limit], 0.0
        if kind.per_cycle is not None:  # the multiprocessors may be slower than the memory
            beyond = max(0.0, nbytes / (kind.per_cycle * self.cycles) - nbytes / bandwidth)
        moved = nbytes * kind.traffic
        seconds = moved * self.from_memory(moved if kind.made else nbytes) / bandwidth + beyond
        seconds = max(seconds, kind.least / self.cycles) + kind.beyond / self.cycles
        launches = kind.launches * spec.kernel
        if kind.elementwise:
            launches -= min(seconds, STARTING * launches)
        seconds += launches
        return seconds + kind.waits(args) if kind.waits is not None and args else seconds

    def bytes_take(self, nbytes: float, limit: str = "memory") -> float:
        """Seconds that a kernel needs to move so many, once."""
        return nbytes * self.from_memory(nbytes) / self.bandwidth[limit]

    def from_memory(self, nbytes: float) -> float:
        """What a kernel of so many bytes takes of the time that it would need without a second-level cache."""
        full = FULL * self.cache
        if nbytes <= full:
            return CACHED
        gone = GONE * self.cache
        return 1.0 if nbytes >= gone else CACHED + (1 - CACHED) * (nbytes - full) / (gone - full)

    def lost(self, nbytes: float) -> float:
        """The share of what was written that the cache no longer has when so many bytes have passed it: none up to half of its size."""
        half = self.cache / 2
        return min(1.0, max(0.0, nbytes - half) / half) if half else 1.0

    def streaming(self, read: float, written: float = 0.0, limit: str = "memory") -> float:
        """For so many bytes, without a launch: what fits into the cache is read from it, as it was written just before. limit: whose share
        of the bandwidth it has."""
        nbytes = read + written
        if nbytes < self.cache:
            nbytes -= read * min(FROM_CACHE, 1 - nbytes / self.cache)
        return nbytes / self.bandwidth[limit]

    def filling(self, nbytes: float) -> float:
        """A kernel that fills memory: no longer than it is launched, where there is little of it."""
        return FILLING * self.spec.kernel + self.streaming(0, nbytes)

    def took(self, cycles: float) -> float:
        """Seconds of that many cycles of a multiprocessor."""
        return cycles / (1e3 * self.spec.clock_rate)

    def reordering(self, image) -> float:
        """A kernel that reads an image and writes it with its channels elsewhere."""
        moved = 2 * image.nbytes / self.bandwidth["memory"]
        return self.spec.kernel + max(moved, REORDERED * image.numel() / self.cycles)

    def plain(self, flops: float, moved: float, key) -> float:
        """A kernel of which no more is known than these: at the share of large products, or of memory."""
        spec = self.spec
        peak = spec.rates.get(key, spec.rates[FLOAT32])
        if not self.peak:
            peak *= self.achieved.product(key)
        return spec.kernel + max(flops / peak, moved / self.bandwidth["memory"])

    def product(self, count: int, rows: int, columns: int, length: int, key, size: int, together: int = 0) -> float:
        """`count` products of [rows, length] and [length, columns], of `size` bytes a number. key: into Spec.rates. together: the function's."""
        moved = count * size * (rows * length + length * columns + rows * columns)
        return self.spec.kernel + self.multiplying(count, rows, columns, length, key, moved, together)

    def multiplying(
        self,
        count: int,
        rows: int,
        columns: int,
        length: int,
        key,
        moved: float,
        together: int = 0,
        share: float = 1.0,
        fill: int | None = None,
    ) -> float:
        """The same, for a kernel that moves so many bytes; without its launch. together: what the function of that name says of the matrices.
        share: of what products reach of the peak. fill: as above, for a kernel that is not of the card's generation."""
        spec = self.spec
        peak = spec.rates.get(key, spec.rates[FLOAT32])
        flops = 2.0 * count * rows * columns * length
        if self.peak or not flops:
            return max(flops / peak, moved / spec.bandwidth)
        tensor_cores = peak > spec.rates[FLOAT32] or (key == TF32 and key in spec.rates)
        tiles = TENSOR_TILES if tensor_cores else TILES
        narrow = tensor_cores and bool(together)
        warp_groups = tensor_cores and self.hopper
        if fill is None:
            fill = FILL if not tensor_cores else HOPPER_FILL if warp_groups and not narrow else TENSOR_FILL
        each = peak * share * self.achieved.product(key) / spec.processors
        load = 0.0  # seconds a number
        if narrow:
            load = (ODD_LOAD if together == 1 else NARROW_LOAD) / (spec.clock_rate * 1e3)
            if warp_groups:
                each = min(each, peak * MMA_SYNC / spec.processors)
        best = math.inf
        for tall, wide, reached in tiles:
            for height, width in {(tall, wide), (wide, tall)}:
                blocks = count * -(-rows // height) * -(-columns // width)
                for parts in SPLITS:
                    if parts > 1 and (length < 64 * parts or blocks * parts > 2 * spec.processors):
                        break
                    rounds = blocks * parts / spec.processors
                    rounds = math.ceil(rounds) if rounds < WAVE else rounds + 0.5
                    step = max(2 * height * width / (each * reached), load * (height + width))
                    seconds = rounds * step * (-(-length // parts) + fill)
                    if parts > 1:  # partial sums are written, read and added up
                        seconds += 4 * count * rows * columns * (parts + 1) / spec.bandwidth + spec.kernel
                    best = min(best, seconds)
        return max(best, moved / self.bandwidth["memory"])
