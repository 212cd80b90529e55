"""Llama as transformers has it, and as torchtitan had it in 2024: norms in float32, rotary embedding in halves or by complex numbers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Sizes:
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    layers: int = 32


LLAMA2_7B = Sizes(kv_heads=32, hidden=11008, vocabulary=32000)
LLAMA3_1B = Sizes(dim=2048, hidden=8192, layers=16)
LLAMA3_8B = Sizes()
LLAMA3_70B = Sizes(dim=8192, heads=64, hidden=28672, layers=80)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """RMSNorm in plain operations and float32, as transformers has it, and torchtitan had it until March 2025 (its pull request 985)."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Adapted(nn.Module):
    """LoRA: what a layer gives, and a product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float, dropout: float):
        super().__init__()
        self.layer, self.dropout, self.scale = layer.requires_grad_(False), nn.Dropout(dropout), scale
        self.down, self.up = linear(layer.in_features, rank), linear(rank, layer.out_features)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(self.dropout(x))) * self.scale


def turned(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def grouped(q, k, v, causal: bool):
    """The attention repeats keys and values for the queries that share them."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, mix=grouped):
        super().__init__()
        self.size, self.mix = sizes.dim // sizes.heads, mix
        self.q, self.out = linear(sizes.dim, sizes.dim), linear(sizes.dim, sizes.dim)
        self.k, self.v = (linear(sizes.dim, self.size * sizes.kv_heads) for _ in range(2))

    def forward(self, x, cos, sin, cache=None):
        q, k, v = (part(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        return self.out(self.mix(q, k, v, cache is None).transpose(1, 2).reshape(x.shape))


class ComplexAttention(Attention):
    """torchtitan's: pairs are turned as complex numbers, in float32; keys and values are repeated in memory."""

    def rotate(self, x, turns):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def forward(self, x, turns):
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.size) for layer in (self.q, self.k, self.v))
        q, k = self.rotate(q, turns), self.rotate(k, turns)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (
                y[:, :, :, None, :].expand(-1, -1, -1, repeats, -1).reshape(batch, length, -1, self.size)
                for y in (k, v)
            )
        found = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.out(found.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.gate, self.up = linear(sizes.dim, sizes.hidden), linear(sizes.dim, sizes.hidden)
        self.down = linear(sizes.hidden, sizes.dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, attention: nn.Module, norm=Norm):
        super().__init__()
        self.attention, self.feed = attention, FeedForward(sizes)
        self.norms = nn.ModuleList(norm(sizes.dim) for _ in range(2))

    def forward(self, x, *turns):
        x = x + self.attention(self.norms[0](x), *turns)
        return x + self.feed(self.norms[1](x))


class Llama(nn.Module):
    """forward gives the logits. tied: the head has the words' own weight. recompute: each block in the backward pass."""

    recompute = False

    def __init__(self, sizes: Sizes, *, block=lambda sizes: Block(sizes, Attention(sizes)), norm=Norm, tied=False):
        super().__init__()
        self.size = sizes.dim // sizes.heads
        self.words, self.layers = (
            nn.Embedding(sizes.vocabulary, sizes.dim),
            nn.ModuleList(block(sizes) for _ in range(sizes.layers)),
        )
        self.norm, self.head = norm(sizes.dim), None if tied else linear(sizes.dim, sizes.vocabulary)

    def turns(self, x):
        """What queries and keys are turned by: for each block."""
        return angles(x, self.size)

    def forward(self, tokens):
        x = self.words(tokens)
        turns = self.turns(x)
        for layer in self.layers:
            x = checkpoint(layer, x, *turns, use_reentrant=False) if self.recompute else layer(x, *turns)
        x = self.norm(x)
        return self.head(x) if self.head else F.linear(x, self.words.weight)


def angles(x, size: int):
    """Cosine and sine for each token of x [batch, length, dim]."""
    found = torch.zeros(x.shape[1], size, device=x.device)
    return found.cos().to(x.dtype), found.sin().to(x.dtype)
