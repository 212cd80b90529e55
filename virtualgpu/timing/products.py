"""How long a product of matrices takes: the kernel that cuBLAS has for it, or cuDNN for a convolution.

The result is cut into tiles, and a GPU works on as many at once as it has multiprocessors: what is left over after the last full wave is
waited for (NVIDIA, "Matrix Multiplication Background User's Guide", wave and tile quantization). Small tiles reach less than large ones,
and each begins with a stretch in which nothing is multiplied yet. A sum may be split among several multiprocessors (split-K), whose parts
another kernel adds up. One share a card (hardware.achieved), with tiles and their shares alike for all, finds nine of ten of NeuSight's and
DeepBench's products within 30 % (`python -m tests.accuracy.kernels`).
"""

import math
from typing import NamedTuple

from virtualgpu.hardware.datasheet import FLOAT32, TF32


class Product(NamedTuple):
    """`batch` products of [rows, length] and [length, columns]. key: into Spec.rates. moved: bytes, of all.

    together: what kernels.together says of the matrices. share: of what products reach of the peak. along: of the two matrices, how many
    have their numbers one after the other along the sum: both in a layer, one in the gradient of what went into it, none in that of its
    weight. cublas: by its kernels, not by cuDNN's.
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
    cublas: bool = True


def _both(tiles) -> tuple[tuple[int, int, float], ...]:
    """Either way round."""
    return tuple({one: None for tall, wide, reached in tiles for one in ((tall, wide, reached), (wide, tall, reached))})


# rows x columns of a tile, and what it reaches of the largest; the same for all cards
TILES = _both(((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.8), (64, 32, 0.65), (32, 32, 0.5)))
TENSOR_TILES = _both(
    ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.75), (64, 64, 0.55), (64, 32, 0.35), (32, 32, 0.2))
)
# cuBLAS's for Hopper in 16 bits and less have a height of a few and any width (nvjet_.._192x96_.., _64x24_.., _256x144_..), as far as two
# groups of warps can hold the result. What they reach is bound by what they load: numbers of the tile's edges, of which the others of
# tensor cores above say the same (0.95, 0.75, 0.55, 0.35 for 64, 43, 32, 21 results a number)
HELD = 40960  # results of a tile
LOADED = 57  # results for each number of the edges, from which on nothing is lost
HOPPER_TILES = _both(
    (height, width, min(1.0, height * width / (height + width) / LOADED))
    for height in (64, 128, 192, 256)
    for width in range(32, 257, 32)
    if height * width <= HELD
)
SPLITS = (1, 2, 4, 8, 16, 32)  # parts of the sum that several multiprocessors share
PART = 64  # numbers: no part is shorter
# of the sum's length, what the time before the first multiplication is worth: fitted to NeuSight's (float32), DeepBench's (V100 and T4)
# and our own products (Hopper: tests/gpu/h100_kernels.csv, 302 of 16 bits and TF32). A GeForce of Blackwell has Ampere's instructions, no
# wgmma or tcgen05 (PTX ISA, target architectures): its products of 2048 say 64, too
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
WAVE = 4  # up to so many waves the last one is waited for; beyond that, half of one on average
# Cycles of a multiprocessor for each number of the sum, in which a block waits in single precision (sm80_xmma_gemm_.._tilesize32x32x8, one
# block, 512 to 1024 numbers: tests/gpu/h100_profiled.csv). STEP: numbers of the first step, before which nothing is there.
WAIT, STEP = 66, 8


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
    return max(_tiled(kernels, product, peak), product.moved / kernels.bandwidth["memory"])


def _tiled(kernels, product: Product, peak: float) -> float:
    """By the best tiles and parts."""
    spec, key, cublas = kernels.spec, product.key, product.cublas
    batch, rows, columns, length = product[:4]
    processors, cycle, best = spec.processors, kernels.took(1), math.inf
    tensor_cores = peak > spec.rates[FLOAT32] or (key == TF32 and key in spec.rates)
    narrow = tensor_cores and bool(product.together)
    across = tensor_cores and kernels.hopper and cublas and key == TF32 and product.along == 0
    warp_groups = tensor_cores and kernels.hopper and not narrow and not across
    rate = peak * product.share * kernels.achieved.product(key)
    if across:
        rate *= MMA_SYNC
    elif narrow and kernels.hopper:
        rate = min(rate, peak * MMA_SYNC)
    fill = FILL if not tensor_cores else HOPPER_FILL if warp_groups else TENSOR_FILL
    load = cycle * (ODD_LOAD if product.together == 1 else NARROW_LOAD) if narrow else 0.0
    wait = cycle * WAIT if cublas and spec.capability[0] >= 8 and not tensor_cores else 0.0
    nvjet = warp_groups and cublas and spec.capability[0] == 9 and key != TF32
    written = 4 * batch * rows * columns / spec.bandwidth  # parts are written, read and added up
    for height, width, reached in HOPPER_TILES if nvjet else TENSOR_TILES if tensor_cores else TILES:
        blocks = batch * -(-rows // height) * -(-columns // width)
        step = max(2 * height * width * processors / (rate * reached), load * (height + width))
        for parts in SPLITS:
            if parts > 1 and (length < PART * parts or blocks * parts > 2 * processors):
                break
            part = -(-length // parts)
            took = max(_waves(blocks * parts / processors) * step * (part + fill), wait * (part + STEP))
            best = min(best, took + (written * (parts + 1) + spec.kernel if parts > 1 else 0.0))
    return best


def _waves(filled: float) -> float:
    """How many are waited for. filled: by the tiles that there are."""
    return math.ceil(filled) if filled < WAVE else filled + 0.5
