"""How long attention by cuDNN's kernels takes on Hopper: whole tiles of scores, one after the other, and the small kernels beside them.

Forward (cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma), each block has some queries and goes through the keys, a tile at a
time; backward (.._bprop_wgmma), each has some keys and goes through the queries. A multiprocessor has one block at a time. A tile takes
as long as the slower of two: its products, and what is done to each score beside them (exponential, mask, dropout). Before its tiles a
block loads what is its own, after them it writes its result, and multiplies nothing meanwhile.

Beside the main kernel backward are two that memory bounds: compute_dot_do_o reads the output and its gradient and clears a sum in
float32 for the gradient of the queries, which convert_dq_to_16bits converts at the end.

A mask that is added to the scores passes beside nothing: forward, each score takes that much longer; backward, its products do.

All figures: tests/gpu/h100_profiled.csv, kernel by kernel (cuDNN 9.19, heads of 32 to 128 over 49 to 4096 keys; masks of all queries and
keys, of each image or each head).
"""

import math
from typing import NamedTuple

from virtualgpu.timing.kernels import Kernels
from virtualgpu.timing.products import WAVE


class Pass(NamedTuple):
    """One of the two. Cycles are those of a multiprocessor."""

    own: int  # queries (backward: keys) of a block
    each: int  # keys (backward: queries) of a tile
    products: int  # of a tile, with as many numbers of a head as its scores
    reached: float  # of the peak, by these products
    score: float  # cycles a score
    dropped: float  # more cycles a score for dropout: Philox's numbers
    fill: float  # cycles for each number of a head, in which a block multiplies nothing
    slowed: float = 1.0  # times the cycles of its products, where a mask is added to the scores
    # cycles a score for that mask; and where there are odd numbers of keys, so that its rows begin anywhere
    biased: float = 0.0
    biased_odd: float = 0.0


FORWARD = Pass(128, 128, products=2, reached=0.76, score=0.137, dropped=0.235, fill=37, biased=0.2, biased_odd=0.52)
BACKWARD = Pass(64, 64, products=5, reached=0.68, score=0.32, dropped=0.134, fill=92, slowed=2.0)
BIASED_FILL = 1500  # cycles more of a block, where there is one
MASKED = (
    1.1  # what a tile takes beneath a causal mask, whose blocks are not alike, so that the last ones are waited for
)
HEADS = (
    64  # numbers of a head: rounded up to a multiple of so many, as the kernels' names say (..64x128x64, ..64x128x128)
)
MEMSET = 0.75e-6  # a counter of blocks, cleared before each call
SEED = 1e-6  # at::cuda::philox::unpack_cudnn, before a forward pass with dropout
CLEARED, CONVERTED = 0.82, 0.75  # of the bandwidth, by the two kernels beside the backward pass


def seconds(
    kernels: Kernels, backward: bool, query, key, causal: bool, drops: bool, biased: bool, moved: float
) -> float:
    """query [batch, heads, queries, head], key [batch, groups, keys, head]. biased: is a mask added to the scores? moved: bytes of all
    tensors that it reads and writes."""
    spec = kernels.spec
    if not backward:
        return MEMSET + drops * SEED + spec.kernel + _main(kernels, FORWARD, query, key, causal, drops, biased, moved)
    numbers = query.numel()
    summed = 4 * numbers  # bytes: of the gradient of the queries
    cleared = (2 * query.itemsize * numbers + summed) / (CLEARED * spec.bandwidth)
    converted = (query.itemsize * numbers + summed) / (CONVERTED * spec.bandwidth)
    main = _main(kernels, BACKWARD, query, key, causal, drops, biased, moved + 2 * summed)
    return MEMSET + 3 * spec.kernel + cleared + main + converted


def _main(kernels: Kernels, one: Pass, query, key, causal: bool, drops: bool, biased: bool, moved: float) -> float:
    batch, heads, queries, head = query.shape
    lengths = (queries, key.shape[2]) if one is FORWARD else (key.shape[2], queries)
    own, tiles = -(-lengths[0] // one.own), -(-lengths[1] // one.each)
    left = causal_tiles(one, own, tiles) if causal else float(tiles)
    spec = kernels.spec
    peak = spec.rates["float16"] / (spec.processors * spec.clock_rate * 1e3)  # FLOPs a cycle
    scores, wide = one.own * one.each, -(-head // HEADS) * HEADS
    multiplying = one.products * 2 * scores * wide / (peak * one.reached)
    tile, fill = max(multiplying, scores * one.score), one.fill * head
    if biased:  # nothing of that passes beside the products
        tile = multiplying * one.slowed + scores * (one.biased_odd if key.shape[2] % 2 else one.biased)
        fill += BIASED_FILL
    tile += scores * one.dropped * drops
    rounds = batch * heads * own / spec.processors
    rounds = math.ceil(rounds) if rounds < WAVE else rounds + 0.5
    cycles = rounds * (fill + left * tile * (MASKED if causal else 1.0))
    return max(cycles * spec.processors / kernels.cycles, moved / kernels.bandwidth["memory"])


def causal_tiles(one: Pass, own: int, tiles: int) -> float:
    """Of so many tiles, what a causal mask leaves of a block, on average over so many blocks: query i looks at keys 0 to i."""
    if one is FORWARD:
        return sum(min(tiles, -(-(block + 1) * one.own // one.each)) for block in range(own)) / own
    return sum(max(0, tiles - block * one.own // one.each) for block in range(own)) / own
