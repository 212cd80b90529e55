"""FLOPs of attention: two products with the scores forward, five backward; of a causal one, the tiles that its mask leaves; and of the
operations that nn.MultiheadAttention and nn.TransformerEncoderLayer become where they only infer."""

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


def fused(query, key, value, is_causal, drops=False, biased=False, learned=False, *, out_val=None) -> int:
    """Of a fused kernel, which leaves out what a causal mask hides. drops: does it drop scores? biased: does it add a mask to them?
    learned: and make a gradient of it? The same FLOPs."""
    flops = attention(query, key, value)
    return int(flops * causal_share(query.shape[2], key.shape[2])) if is_causal else flops


def fused_backward(query, key, value, is_causal, drops=False, biased=False, learned=False, *, out_val=None) -> int:
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


def multi_head(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, *args, out_val=None, **kwargs
) -> int:
    """Of `_native_multi_head_attention`. query, key, value [batch, L or S, E]; qkv_weight [3 E, E], proj_weight [E, E]."""
    batch, queries, _ = query.shape
    projections = 2 * batch * (queries + key.shape[1]) * (qkv_weight.numel() + proj_weight.numel()) // 2
    return projections + 4 * batch * queries * key.shape[1] * embed_dim


def encoder_layer(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, *args, out_val=None, **kwargs) -> int:
    """Of `_transformer_encoder_layer_fwd`: attention of src [batch, L, E], and the two products of the feed-forward part."""
    attended = multi_head(src, src, src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight)
    weights = [args[index] for index in FEED_FORWARD]
    return attended + 2 * src.shape[:2].numel() * sum(weight.numel() for weight in weights)


FEED_FORWARD = (8, 10)  # where its two weights stand in the schema, after proj_weight
