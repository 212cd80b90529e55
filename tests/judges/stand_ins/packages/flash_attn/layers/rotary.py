"""Rotary positions of (batch, sequence, heads, width), halves apart."""

import torch


def apply_rotary_emb(x, cos, sin, interleaved=False, **options):
    half = cos.size(-1)
    cos, sin = cos[: x.size(1), None], sin[: x.size(1), None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)
