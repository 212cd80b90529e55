"""Attention: its FLOPs, and how long the fused kernels take: FlashAttention's, the memory-efficient ones (xformers') and cuDNN's.

FLOPs: two products with the scores forward, five backward; of a causal one, the tiles that its mask leaves; and those of the operations that
nn.MultiheadAttention and nn.TransformerEncoderLayer become where they only infer.

Seconds: a roofline of these FLOPs, in whole tiles, and the bytes. What a card's kernels take over its peak, and before their first tile, is
fitted to measured ones: `data/attention.csv`, written by `python -m tests.gpu.tables`. Other cards reach the shares that others published.
"""

from collections.abc import Callable

from torch.utils.flop_counter import sdpa_flop_count

from virtualgpu.hardware.datasheet import FLOAT32, TF32
from virtualgpu.timing.kernels import Kernels, measured_rows

# Queries and keys of a tile, as most of FlashAttention 2's kernels have them (flash_attn/src/flash_fwd_launch_template.h): a tile that
# the mask cuts is computed as a whole, one that it hides is left out.
TILE = (128, 64)
FEED_FORWARD = (8, 10)  # where the two weights of an encoder layer stand in the schema, after proj_weight
# Kernels compute whole tiles of at least so many queries and keys (fmha_cutlassF_f32_aligned_64x64): 197 keys take as long as 256
WHOLE = 64
# Numbers of a head, of which fewer take as long, as each score has its exponential beside (cuDNN 9.19 on an H100: 107 forward, 89 backward)
SCORE = 96
# Where no card was measured. Keys: attention over so many reaches half of its share (FlashAttention 3, figure 5: 309 at 512 keys, 370 at 16384);
# numbers of a head: cuDNN's kernels reach less for smaller ones, as its root (465 and 675 TFLOPS for 64 and 128, 406 and 490 back)
SHORT, HEAD = 100, 128
# The memory-efficient kernels, over products of the same type: xformers' benchmarks on an A100 (64 x 16 heads of 64 over 1024 keys:
# 164 TFLOPS forward, 61 to 68 backward in float16; 47 and 26 in float32, which they multiply as TF32 in any case)
EFFICIENT, EFFICIENT_TF32 = {"forward": 0.68, "backward": 0.28}, {"forward": 0.42, "backward": 0.23}


def attention(query, key, value, *args, out_val=None, **kwargs) -> int:
    """Of all scores. query [batch, heads, L, E]; several of its heads may share one of `key` [batch, groups, S, E] and `value`."""
    heads = query.shape[:2]
    return sdpa_flop_count(query.shape, (*heads, *key.shape[2:]), (*heads, *value.shape[2:]))


def attention_backward(grad, query, key, value, *args, out_val=None, **kwargs) -> int:
    """Five products of that size instead of two: scores again, and the gradients of scores, query, key and value."""
    return attention(query, key, value) * 5 // 2


def fused(query, key, value, is_causal, drops=False, biased=False, learned=False, *, out_val=None) -> int:
    """Of a fused kernel, which leaves out what a causal mask hides; dropout and other masks (biased, learned) change nothing."""
    flops = attention(query, key, value)
    return int(flops * causal_share(query.shape[2], key.shape[2])) if is_causal else flops


def fused_backward(query, key, value, is_causal, drops=False, biased=False, learned=False, *, out_val=None) -> int:
    """As attention_backward."""
    return fused(query, key, value, is_causal) * 5 // 2


def causal_share(queries: int, keys: int) -> float:
    """The share of the scores whose tiles a causal mask leaves: query i looks at keys 0 to i."""
    rows, columns = TILE
    if not queries or not keys:
        return 1.0
    ends = [(begin, min(begin + rows, queries)) for begin in range(0, queries, rows)]
    return sum((end - begin) * min(keys, -(-end // columns) * columns) for begin, end in ends) / (queries * keys)


def multi_head(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, *args, out_val=None, **kwargs
) -> int:
    """Of `_native_multi_head_attention`. query, key, value [batch, L or S, E]; qkv_weight [3 E, E], proj_weight [E, E]."""
    batch, queries, _ = query.shape
    projections = batch * (queries + key.shape[1]) * (qkv_weight.numel() + proj_weight.numel())
    return projections + 4 * batch * queries * key.shape[1] * embed_dim


def encoder_layer(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, *args, out_val=None, **kwargs) -> int:
    """Of `_transformer_encoder_layer_fwd`: attention of src [batch, L, E], and the two products of the feed-forward part."""
    attended = multi_head(src, src, src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight)
    return attended + 2 * src.shape[:2].numel() * sum(args[index].numel() for index in FEED_FORWARD)


def rule(which: str, by: str = "flash") -> Callable:
    """`which`: forward or backward. The rule is asked with (query, key, value, is_causal, drops, biased, learned), as engine.attention books both."""

    def ask(kernels: Kernels, args, tensors, flops, moved, key) -> float:
        query, keys = args[0], args[1].shape[2]
        row = measured_rows("attention", kernels.spec, "by", "pass", "bits").get((by, which, str(8 * query.itemsize)))
        if by == "efficient" or row:
            flops *= in_whole_tiles(query.shape[2], keys)
        if row is None:
            return _by_published_shares(kernels, which, by, query, keys, flops, moved, key)
        seconds = float(row["seconds"]) + roofline(kernels, which, by, query, flops, moved, key, float(row["factor"]))
        for column, asked in zip(("dropped", "biased"), args[4:6], strict=False):
            seconds *= float(row[column] or 1.0) if asked is True else 1.0
        return seconds

    return ask


def roofline(kernels: Kernels, which: str, by: str, query, flops: float, moved: float, key, factor: float) -> float:
    """Of `flops` in whole tiles. factor: over the peak. FlashAttention's and cuDNN's backward moves all before and after the main kernel."""
    peak = kernels.spec.rates.get(TF32 if key == FLOAT32 else key, kernels.spec.rates[FLOAT32])
    busy = factor * flops * max(1.0, SCORE / max(query.shape[-1], 1)) / peak
    moving = moved / kernels.bandwidth["memory"]
    return busy + moving if which == "backward" and by != "efficient" else max(busy, moving)


def in_whole_tiles(queries: int, keys: int) -> float:
    """The scores of whole tiles over those that are asked for."""
    return -(-queries // WHOLE) * -(-keys // WHOLE) * WHOLE**2 / max(queries * keys, 1)


def _by_published_shares(kernels: Kernels, which, by, query, keys: int, flops: float, moved: float, key) -> float:
    spec, achieved, reached = kernels.spec, kernels.achieved, keys / (keys + SHORT)
    if by == "efficient":
        single = key == FLOAT32 and TF32 in spec.rates
        key = TF32 if single else key
        reached = (EFFICIENT_TF32 if single else EFFICIENT)[which] * achieved.product(key)
    elif by == "cudnn" and kernels.hopper:
        reached *= achieved.attention[f"cudnn_{which}"] * min(1.0, (query.shape[-1] / HEAD) ** 0.5)
    else:
        reached *= achieved.attention[which]
    busy = flops / (spec.rates.get(key, spec.rates[FLOAT32]) * reached) if flops else 0.0
    launches = 3 if which == "backward" and by != "efficient" else 1
    return spec.kernel * launches + max(busy, moved / kernels.bandwidth["memory"])
