"""Attention of (batch, sequence, heads, width) by scaled_dot_product_attention."""

import torch


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **options):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    shared = {"enable_gqa": True} if q.size(1) != k.size(1) else {}
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, None, dropout_p, causal, scale=softmax_scale, **shared
    )
    return out.transpose(1, 2)
