"""How long a product of matrices takes: the kernel that cuBLAS has for it, or cuDNN for a convolution.

The result is cut into tiles, and a GPU works on as many at once as it has multiprocessors: what is left over after the last full round is
waited for (NVIDIA, "Matrix Multiplication Background User's Guide", wave and tile quantization). Small tiles reach less than large ones,
and each begins with a stretch in which nothing is multiplied yet. A sum may be split among several multiprocessors, whose parts another
kernel adds up. One share a card (hardware.achieved), with tiles and their shares alike for all, finds nine of ten of NeuSight's and
DeepBench's products within 30 %.

A block that has a multiprocessor to itself waits for its next numbers in each step along the sum: small products in single precision,
which have no other blocks to fill the gaps, take as long as their sum is long.
"""

import math
from typing import NamedTuple

from virtualgpu.hardware.datasheet import FLOAT32, TF32


class Product(NamedTuple):
    """`batch` products of [rows, length] and [length, columns]. key: into Spec.rates. moved: bytes, of all.

    together: what kernels.together says of the matrices. share: of what products reach of the peak. along: of the two matrices, how many
    have their numbers one after the other along the sum: both in a layer, one in the gradient of what went into it, none in that of its
    weight. bias: one is added. cublas: by its kernels, not by cuDNN's.
    """

    batch: int
    rows: int
    columns: int
    length: int
    key: str
    moved: float
    together: int = 0
    share: float = 1.0
    along: int = 2
    bias: bool = False
    cublas: bool = True


# rows x columns of a tile, and what it reaches of the largest; the same for all cards
TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.8), (64, 32, 0.65), (32, 32, 0.5))
TENSOR_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.75), (64, 64, 0.55), (64, 32, 0.35), (32, 32, 0.2))
# cuBLAS's for Hopper in 16 bits and less have a height of a few and any width (nvjet_.._192x96_.., _64x24_.., _256x144_..), as far as two
# groups of warps can hold the result. What they reach is bound by what they load: numbers of the tile's edges, of which the others of
# tensor cores above say the same (0.95, 0.75, 0.55, 0.35 for 64, 43, 32, 21 results a number)
HEIGHTS, WIDTHS, HELD = (64, 128, 192, 256), range(32, 257, 32), 40960
LOADED = 57  # results for each number of the edges, from which on nothing is lost
SPLITS = (1, 2, 4, 8, 16, 32)  # parts of the sum that several multiprocessors share
PART = 64  # numbers: no part is shorter
# of the sum's length, what the time before the first multiplication is worth: fitted to NeuSight's (float32), DeepBench's (V100 and T4)
# and our own products (Hopper: tests/gpu/h100_kernels.csv, 302 of 16 bits and TF32). A GeForce of Blackwell has Ampere's instructions, no wgmma or tcgen05 (PTX
# ISA, target architectures): its products of 2048 say 64, too
FILL, TENSOR_FILL, HOPPER_FILL = 32, 64, 128
# Rows that are no multiple of 16 bytes are read in narrower loads, beside the multiplications: cycles of a multiprocessor for each
# number of a tile's edges. Of an odd length one number at a time: 1.67 ms for 16 x 248077 x 2560 in bfloat16 on an A100, 128 x 64 tiles
# (pegainfer, docs/models/qwen35/decode-kernel-attribution.md, 2026). Else: 130.56 us for 9477 x 1152 x 588 on an H100 at 1200 MHz
# (kestrel, pull request 143, 2026). Where the tensor cores take longer, nothing is lost: DeepBench's on V100 and T4 (lengths of 1530),
# pytorch#181718's on an RTX 4090 (2055)
ODD_LOAD, NARROW_LOAD = 0.26, 0.16
# Such rows cannot go to wgmma or tcgen05; what mma.sync reaches of a Hopper's peak: Luo et al., "Benchmarking and Dissecting the Nvidia
# Hopper GPU Architecture via Microbenchmarking", 2024. Nor can TF32 where neither matrix lies along the sum, as in a weight's gradient
# (cutlass_80_tensorop_s1688gemm): wgmma takes other layouts in 16 bits alone (PTX ISA, wgmma.mma_async)
MMA_SYNC = 0.63
WAVE = 4  # up to so many rounds the last one is waited for; beyond that, half of one on average
# Cycles of a multiprocessor for each number of the sum, in which a block waits: in single precision (sm80_xmma_gemm_.._tilesize32x32x8, one
# block, 512 to 1024 numbers) for matrices that lie along the sum, and for those that do not (.._nt_n); in 16 bits with narrow loads
# (cutlass_80_wmma_tensorop). tests/gpu/h100_profiled.csv, as all below. AHEAD: numbers of the first step, before which nothing is there.
ALONG_WAIT, ACROSS_WAIT, NARROW_WAIT, AHEAD = 66, 41, 22, 8
# Rows of an odd length are left to kernels of Turing on a Hopper (cutlass_75_tensorop_.._align1). They wait as long as single precision does, split
# the sum in any number of parts, and load so many cycles an edge: where both matrices lie along the sum, and otherwise. Where only the result's
# rows are odd, they have no larger tiles than 128 x 128. 156 products of 257 to 50257 columns on an H100 (tests/gpu/h100_profiled.csv)
ALONG_ODD, ACROSS_ODD, ODD_SPLITS, ODD_ROUNDS = 0.31, 0.27, range(1, 33), 4
# Single precision, fewer multiplications than so many: cuBLAS always splits the sum, or with a bias takes sgemm_largek_lds64, one block with
# three kernels beside it (a counter cleared, the result scaled, the bias added)
FEW = 1 << 21
LARGEK, LARGEK_STEP = 9e-6, 23  # those kernels beside its launch, and cycles for each number of the sum
# With a bias and up to so many rows: gemmSN_TN_kernel, cycles for each number of the sum
FEW_ROWS, FEW_ROWS_WAIT = 16, 19
# With a bias, others split the sum of few tiles of 64 x 64 alone, in so many parts of so many numbers at least; longer sums in two
SPLIT_TILES, BIAS_SPLITS, BIAS_PART, LONG = 8, (1, 2, 4), 128, 1024
BIAS_WAIT = 800  # cycles: Hopper's read the bias after the last multiplication, by one wait for memory (0.4 us)


def seconds(kernels, product: Product) -> float:
    """With its launches. kernels: a Kernels."""
    return kernels.spec.kernel + busy(kernels, product)


def busy(kernels, product: Product) -> float:
    """Without the first launch."""
    spec = kernels.spec
    peak = spec.rates.get(product.key, spec.rates[FLOAT32])
    flops = 2.0 * product.batch * product.rows * product.columns * product.length
    if kernels.peak or not flops:
        return max(flops / peak, product.moved / spec.bandwidth)
    return max(_Way(kernels, product, peak).best(), product.moved / kernels.bandwidth["memory"])


class _Way:
    """The kernels that there are for one product, on one card."""

    def __init__(self, kernels, product: Product, peak: float):
        self.product, self.spec = product, kernels.spec
        spec, key = self.spec, product.key
        self.tensor_cores = peak > spec.rates[FLOAT32] or (key == TF32 and key in spec.rates)
        narrow = self.tensor_cores and bool(product.together)
        across = product.cublas and key == TF32 and product.along == 0
        warp_groups = self.tensor_cores and kernels.hopper and not narrow and not across
        self.fill = FILL if not self.tensor_cores else HOPPER_FILL if warp_groups else TENSOR_FILL
        # FLOPs a second, of one multiprocessor
        self.each = peak * product.share * kernels.achieved.product(key) / spec.processors
        if self.tensor_cores and kernels.hopper and across:
            self.each *= MMA_SYNC
        elif self.tensor_cores and kernels.hopper and narrow:
            self.each = min(self.each, peak * MMA_SYNC / spec.processors)
        self.cycle = kernels.took(1)
        self.odd = product.cublas and narrow and product.together == 1 and spec.capability[0] == 9
        load = ODD_LOAD if product.together == 1 else NARROW_LOAD
        if self.odd:
            load = ALONG_ODD if product.along == 2 else ACROSS_ODD
        self.load = load * self.cycle if narrow else 0.0
        # nvjet's
        self.of_hopper = warp_groups and product.cublas and spec.capability[0] == 9 and key != TF32
        # whose kernels in single precision, or narrow ones, are those of Ampere
        self.of_ampere = product.cublas and spec.capability[0] >= 8 and (narrow or not self.tensor_cores)

    def best(self) -> float:
        """Seconds, without the first launch."""
        if self.of_ampere and not self.tensor_cores:
            return self.single_precision()
        if self.odd:
            return self.tiled(ODD_SPLITS, wait=ALONG_WAIT, most=ODD_ROUNDS)
        bias = BIAS_WAIT * self.cycle if self.of_hopper and self.product.bias else 0.0
        return bias + self.tiled(wait=NARROW_WAIT if self.of_ampere else 0)

    def single_precision(self) -> float:
        """As cuBLAS chooses on Ampere and later; with a bias among its kernels that add one (cublasLt)."""
        product = self.product
        few = product.batch * product.rows * product.columns * product.length < FEW
        if not product.bias:
            wait = ALONG_WAIT if product.along else ACROSS_WAIT
            return self.tiled(wait=wait, always=few and product.batch == 1 and product.along > 0)
        if product.rows <= FEW_ROWS:
            return self.tiled((1,), wait=FEW_ROWS_WAIT)
        if few:
            return LARGEK + LARGEK_STEP * product.length * self.cycle
        if -(-product.rows // 64) * -(-product.columns // 64) <= SPLIT_TILES:
            return self.tiled(BIAS_SPLITS, BIAS_PART, ALONG_WAIT)
        return self.tiled((1,) if product.length <= LONG else (1, 2), wait=ALONG_WAIT)

    def tiled(self, splits=SPLITS, shortest: int = PART, wait: float = 0, always: bool = False, most: int = 2) -> float:
        """By the best tiles and parts, no more of which than `most` a multiprocessor. wait: cycles for each number of the sum.

        always: a second kernel is there, split or not."""
        product, spec = self.product, self.spec
        batch, rows, columns, length = product[:4]
        processors, best = spec.processors, math.inf
        written = 4 * batch * rows * columns / spec.bandwidth  # partial sums are written, read and added up
        for height, width, reached in self.tiles():
            blocks = batch * -(-rows // height) * -(-columns // width)
            step = max(2 * height * width / (self.each * reached), self.load * (height + width))
            for parts in splits:
                if parts > 1 and (length < shortest * parts or blocks * parts > most * processors):
                    break
                rounds = blocks * parts / processors
                rounds = math.ceil(rounds) if rounds < WAVE else rounds + 0.5
                part = -(-length // parts)
                seconds = max(rounds * step * (part + self.fill), wait * self.cycle * (part + AHEAD))
                if parts > 1:
                    seconds += written * (parts + 1) + spec.kernel
                elif always:
                    seconds += spec.kernel
                best = min(best, seconds)
        return best

    def tiles(self) -> tuple[tuple[int, int, float], ...]:
        """Either way round."""
        if self.odd:
            return OF_ODD if self.product.along == 2 and self.product.length % 2 == 0 else OF_TENSOR_CORES
        return OF_HOPPER if self.of_hopper else OF_TENSOR_CORES if self.tensor_cores else OF_CORES


def _both(tiles) -> tuple[tuple[int, int, float], ...]:
    return tuple({one: None for tall, wide, reached in tiles for one in ((tall, wide, reached), (wide, tall, reached))})


OF_CORES, OF_TENSOR_CORES = _both(TILES), _both(TENSOR_TILES)
OF_ODD = _both(tile for tile in TENSOR_TILES if tile[0] * tile[1] <= 128 * 128)
OF_HOPPER = _both(
    (height, width, min(1.0, height * width / (height + width) / LOADED))
    for height in HEIGHTS
    for width in WIDTHS
    if height * width <= HELD
)
