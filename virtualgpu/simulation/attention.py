"""FLOPs of attention: two products with the scores forward, five backward; of a causal one, the tiles that its mask leaves."""

from torch.utils.flop_counter import sdpa_flop_count

# Queries and keys of a tile, as most of FlashAttention 2's kernels have them (flash_attn/src/flash_fwd_launch_template.h): a tile that
# the mask cuts is computed as a whole, one that it hides is left out.
TILE = (128, 64)


def attention(query, key, value, *args, out_val=None, **kwargs) -> int:
    """Of all scores. query [batch, heads, L, E]; several of its heads may share one of `key` [batch, groups, S, E] and `value`."""
    heads = query.shape[:2]
    return sdpa_flop_count(query.shape, (*heads, *key.shape[2:]), (*heads, *value.shape[2:]))


def attention_backward(grad, query, key, value, *args, out_val=None, **kwargs) -> int:
    """Five products of that size instead of two: scores again, and the gradients of scores, query, key and value."""
    return attention(query, key, value) * 5 // 2


def fused(query, key, value, is_causal, *, out_val=None) -> int:
    """Of a fused kernel, which leaves out what a causal mask hides."""
    flops = attention(query, key, value)
    return int(flops * causal_share(query.shape[2], key.shape[2])) if is_causal else flops


def fused_backward(query, key, value, is_causal, *, out_val=None) -> int:
    """Of a fused kernel's backward pass."""
    return fused(query, key, value, is_causal) * 5 // 2


def causal_share(queries: int, keys: int) -> float:
    """The share of the scores whose tiles a causal mask leaves: query i looks at keys 0 to i."""
    rows, columns = TILE
    if not queries or not keys:
        return 1.0
    computed = 0
    for begin in range(0, queries, rows):
        end = min(begin + rows, queries)
        computed += (end - begin) * min(keys, -(-end // columns) * columns)
    return computed / (queries * keys)
