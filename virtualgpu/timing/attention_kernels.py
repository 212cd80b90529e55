"""How long fused attention takes: FlashAttention's kernels, the memory-efficient ones (xformers') and, on Hopper, cuDNN's."""

import math
from collections.abc import Callable

from virtualgpu.hardware.datasheet import FLOAT32, TF32
from virtualgpu.timing import cudnn_attention
from virtualgpu.timing.kernels import Kernels
from virtualgpu.timing.memory_bound import ORDINARY
from virtualgpu.timing.products import WAVE
from virtualgpu.timing.reductions import plan_of_rows

SHORT = 100  # keys: attention over so many reaches half of its share (FlashAttention 3, figure 5: 309 at 512 keys, 370 at 16384)
HEAD = 128  # numbers of a head; kernels reach less for smaller ones, as its root (465 and 675 TFLOPS for 64 and 128, 406 and 490 back)
# The memory-efficient kernels, over products of the same type: xformers' benchmarks on an A100 (64 x 16 heads of 64 over 1024 keys:
# 164 TFLOPS forward, 61 to 68 backward in float16; 47 and 26 in float32)
EFFICIENT_REACHED, EFFICIENT_TF32_REACHED = {"forward": 0.68, "backward": 0.28}, {"forward": 0.42, "backward": 0.23}
# They have Ampere's instructions, and gain nothing by Hopper's: measured on an H100 (tests/gpu/h100_kernels.csv), heads of 128, 174
# TFLOPS forward, 47 and 37 in float32; forward, heads of 64 as their root (130, and 33 in float32)
HOPPERS_REACHED, HOPPERS_TF32_REACHED = {"forward": 0.24, "backward": 0.15}, {"forward": 0.127, "backward": 0.092}
# Backward, in 16 bits, heads of more than 64 and up to 128 numbers have blocks of 128 x 128 and reach more (the same table: 132 TFLOPS;
# 103 with heads of 64)
HOPPERS_WIDE_REACHED, WIDE = 0.185, range(65, 129)
# They compute whole tiles (fmha_cutlassF_f32_aligned_64x64): 197 keys take as long as 256. Forward, what a block does before its tiles
# is worth so many keys: 24 TFLOPS over 128, 31 over 512 (float32, tests/gpu/h100_profiled.csv)
EFFICIENT_TILE, EFFICIENT_SHORT = 64, {"forward": 40, "backward": 0}
# Backward, heads below so many numbers take as long as such (fmha_cutlassB_.._k32 beside .._k64, each with a mask: 0.86 of it)
EFFICIENT_HEAD = 55
# Cycles of a multiprocessor for each score of a tile to which a mask is added, in 16 bits and in 32: forward and backward of heads of 32
# to 128, beside the same without a mask (the same table)
BIASED, BIASED_SINGLE = {"forward": 0.27, "backward": 0.45}, {"forward": 0.42, "backward": 0.45}
# Backward, a block has so many keys of one head, or twice as many (fmha_cutlassB_bf16_aligned_128x128_k128); a multiprocessor has two or
# three blocks at a time, and one that has it to itself reaches this share of what they reach: 64 keys of 128 heads took 1.5 times as
# long for each score as longer ones, 128 keys of 384 heads in single precision 1.3 times
BLOCK_KEYS, ALONE = 64, 0.68
MANY_HEADS = 256  # that are not split further where there are no more keys than two blocks have (attention_backward.cu)


def rule(which: str, by: str = "flash") -> Callable:
    """`which`: forward or backward. The rule is asked with (query, key, value, is_causal, drops, biased, learned), as engine.sdpa books both."""

    def ask(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        if by == "efficient":
            return _efficient(kernels, which, args, flops, moved, key)
        spec = kernels.spec
        if by == "cudnn" and spec.capability[0] == 9:
            causal, drops, biased = args[3:6]
            return cudnn_attention.seconds(kernels, which == "backward", args[0], args[1], causal, drops, biased, moved)
        keys, head = args[1].shape[2], args[0].shape[-1]
        if by == "cudnn" and kernels.hopper:
            reached = kernels.achieved.attention[f"cudnn_{which}"] * min(1.0, (head / HEAD) ** 0.5)
        else:
            reached = kernels.achieved.attention[which]
        reached *= keys / (keys + SHORT)
        busy = flops / (spec.rates.get(key, spec.rates[FLOAT32]) * reached)
        return spec.kernel * (1 if which == "forward" else 3) + max(busy, moved / kernels.bandwidth["memory"])

    return ask


def _efficient(kernels: Kernels, which: str, args, flops: float, moved: float, key) -> float:
    query, keys = args[0], args[1].shape[2]
    biased, learned = args[5:7]
    queries, head = query.shape[-2], max(query.shape[-1], 1)
    spec, single = kernels.spec, key == FLOAT32 and TF32 in kernels.spec.rates
    if single:  # these kernels multiply single precision so in any case
        key = TF32
        reached = (HOPPERS_TF32_REACHED if kernels.hopper else EFFICIENT_TF32_REACHED)[which]
    else:
        reached = (HOPPERS_REACHED if kernels.hopper else EFFICIENT_REACHED)[which]
    if which == "backward":
        reached *= min(1.0, head / EFFICIENT_HEAD)
        if kernels.hopper and _is_wide(query):
            reached = HOPPERS_WIDE_REACHED
    elif kernels.hopper:
        reached *= min(1.0, (head / HEAD) ** 0.5)
    whole = [-(-length // EFFICIENT_TILE) * EFFICIENT_TILE for length in (queries, keys)]
    flops *= whole[0] * whole[1] / max(queries * keys, 1)
    reached *= kernels.achieved.product(key) * whole[1] / (whole[1] + EFFICIENT_SHORT[which])
    busy = flops / (spec.rates.get(key, spec.rates[FLOAT32]) * reached)
    scores = query.shape[0] * query.shape[1] * whole[0] * whole[1]
    if biased:
        busy += scores * (BIASED if query.itemsize == 2 else BIASED_SINGLE)[which] / kernels.cycles
    memory = kernels.bandwidth["memory"]
    if which == "forward":
        return spec.kernel + max(busy, moved / memory)
    splits = _splits(query, keys)
    busy *= _waiting(query.shape[0] * query.shape[1] * splits / spec.processors, 2 if single else 3)
    if learned:  # the gradient of the mask is written beside
        busy += query.numel() // head * keys * query.itemsize / memory
    return spec.kernel + max(busy, moved / memory) + _beside(kernels, query, splits > 1)


def _splits(query, keys: int) -> int:
    """Blocks to which the keys of a head are given, backward (attention_backward.cu: num_splits_key)."""
    each = BLOCK_KEYS * (2 if _is_wide(query) else 1)
    if keys <= 2 * each and query.shape[0] * query.shape[1] >= MANY_HEADS:
        return 1
    return -(-keys // each)


def _is_wide(query) -> bool:
    """Has it blocks of 128 keys, backward?"""
    return query.itemsize == 2 and query.shape[-1] in WIDE


def _waiting(blocks: float, together: int) -> float:
    """Times as long as even work takes, for so many blocks a multiprocessor, of which it has some together at a time."""
    most = math.ceil(blocks)
    if not 0 < most < WAVE:
        return 1.0
    return (most - 1 + 1 / ALONE if most % together == 1 else most) / blocks


def _beside(kernels: Kernels, query, split: bool) -> float:
    """The kernels before the memory-efficient backward pass (attention_backward.cu).

    In single precision the output times its gradient, the sum of that over each head, and a copy of it; in 16 bits the kernel reckons
    that by itself. Zeros for the queries' gradient in single precision, where several blocks add to it (split).
    """
    spec, numbers, head = kernels.spec, query.numel(), max(query.shape[-1], 1)
    seconds = kernels.filling(4 * numbers) if split else 0.0
    if query.itemsize == 2:
        return seconds
    rows = numbers // head
    seconds += kernels.moving(3 * query.nbytes, ORDINARY) + spec.kernel
    return seconds + plan_of_rows(rows, head, spec).seconds(kernels, query.nbytes + rows * query.itemsize)
