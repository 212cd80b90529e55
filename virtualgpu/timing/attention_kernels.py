"""How long fused attention takes: FlashAttention's kernels, the memory-efficient ones (xformers') and, on Hopper, cuDNN's."""

from collections.abc import Callable

from virtualgpu.hardware.datasheet import FLOAT32, TF32
from virtualgpu.timing import cudnn_attention
from virtualgpu.timing.kernels import Kernels

SHORT = 100  # keys: attention over so many reaches half of its share (FlashAttention 3, figure 5: 309 at 512 keys, 370 at 16384)
HEAD = 128  # numbers of a head; kernels reach less for smaller ones, as its root (465 and 675 TFLOPS for 64 and 128, 406 and 490 back)
# The memory-efficient kernels, over products of the same type: xformers' benchmarks on an A100 (64 x 16 heads of 64 over 1024 keys:
# 164 TFLOPS forward, 61 to 68 backward in float16; 47 and 26 in float32)
EFFICIENT, EFFICIENT_TF32 = {"forward": 0.68, "backward": 0.28}, {"forward": 0.42, "backward": 0.23}
# They have Ampere's instructions, and gain nothing by Hopper's: measured on an H100 (tests/gpu/h100_kernels.csv), heads of 128, 174 and
# 122 TFLOPS, 47 and 37; forward, heads of 64 as their root (130, and 33 in float32)
HOPPERS, HOPPERS_TF32 = {"forward": 0.24, "backward": 0.15}, {"forward": 0.127, "backward": 0.092}
# They compute whole tiles (fmha_cutlassF_f32_aligned_64x64): 197 keys take as long as 256. Forward, what a block does before its tiles
# is worth so many keys: 24 TFLOPS over 128, 31 over 512 (float32, tests/gpu/h100_profiled.csv)
EFFICIENT_TILE, EFFICIENT_SHORT = 64, {"forward": 40, "backward": 0}
# Beside their backward pass: the output times its gradient (three tensors), the sum of that (one), zeros for the queries' gradient
BESIDE, BESIDE_KERNELS = 5, 4


def rule(which: str, by: str = "flash") -> Callable:
    """`which`: forward or backward. The rule is asked with (query, key, value, is_causal, drops), as engine.sdpa books both."""

    def ask(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        if by == "efficient":
            return _efficient(kernels, which, args, flops, moved, key)
        spec = kernels.spec
        if by == "cudnn" and spec.capability[0] == 9:
            causal, drops = args[3:5]
            return cudnn_attention.seconds(kernels, which == "backward", args[0], args[1], causal, drops, moved)
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
    (queries, head), keys = args[0].shape[-2:], args[1].shape[2]
    spec, single = kernels.spec, key == FLOAT32 and TF32 in kernels.spec.rates
    if single:  # these kernels multiply single precision so in any case
        key = TF32
        reached = (HOPPERS_TF32 if kernels.hopper else EFFICIENT_TF32)[which]
    else:
        reached = (HOPPERS if kernels.hopper else EFFICIENT)[which]
    if kernels.hopper and which == "forward":
        reached *= min(1.0, (head / HEAD) ** 0.5)
    whole = [-(-length // EFFICIENT_TILE) * EFFICIENT_TILE for length in (queries, keys)]
    flops *= whole[0] * whole[1] / max(queries * keys, 1)
    reached *= kernels.achieved.product(key) * whole[1] / (whole[1] + EFFICIENT_SHORT[which])
    busy = flops / (spec.rates.get(key, spec.rates[FLOAT32]) * reached)
    memory = kernels.bandwidth["memory"]
    seconds = spec.kernel + max(busy, moved / memory)
    return seconds if which == "forward" else seconds + BESIDE_KERNELS * spec.kernel + BESIDE * args[0].nbytes / memory
