"""How long a product of matrices takes: the kernel that cuBLAS has for it, or cuDNN for a convolution.

The result is cut into tiles, and a GPU works on a wave of them at once, one a multiprocessor; the last wave is waited for (NVIDIA, "Matrix
Multiplication Background User's Guide", wave and tile quantization). Small tiles reach less than large ones, and each begins with a stretch
in which nothing is multiplied yet. A sum may be split among multiprocessors (split-K), whose parts another kernel adds up. One share a card
(hardware.achieved) and the same tiles for all find nine of ten products within 30 % (`python -m tests.accuracy.kernels`).
"""

import math
from typing import NamedTuple

from virtualgpu.hardware.datasheet import FLOAT32, TF32


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
    narrow = tensor_cores and bool(product.vector_width)
    across = tensor_cores and kernels.hopper and cublas and key == TF32 and product.along == 0
    warp_groups = tensor_cores and kernels.hopper and not narrow and not across
    rate = peak * product.fraction * kernels.achieved.product(key)
    if kernels.hopper and (across or narrow):
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
