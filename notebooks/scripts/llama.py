"""Llama's architecture, small enough to read: notebook 10 trains it, notebook 12 plans with it. Sizes are arguments; weights are PyTorch's default ones.

Llama(layers=8, dim=256, heads=8, kv_heads=4, hidden=1024, words=2000, length=64)
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def turn(x, turns):
    """Rotary position embedding: pairs of numbers, turned by the token's place."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def angles(length, size):
    angle = torch.outer(torch.arange(length), 500_000.0 ** -torch.linspace(0, 1, size // 2))
    return torch.polar(torch.ones_like(angle), angle)[:, None]


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.size, self.repeats = dim // heads, heads // kv_heads
        self.q, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, self.size * kv_heads, bias=False) for _ in range(2))

    def forward(self, x, turns):
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(self.repeats, dim=2) for y in (turn(k, turns), v))
        heads = [y.transpose(1, 2) for y in (turn(q, turns), k, v)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainNorm(nn.Module):
    """RMSNorm in plain operations and float32, as torchtitan had it until March 2025: slower than nn.RMSNorm's one kernel, and more is kept."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden, norm=nn.RMSNorm):
        super().__init__()
        self.norm1, self.attention = norm(dim), Attention(dim, heads, kv_heads)
        self.norm2, self.feed_forward = norm(dim), FeedForward(dim, hidden)

    def forward(self, x, turns):
        x = x + self.attention(self.norm1(x), turns)
        return x + self.feed_forward(self.norm2(x))


class Full(Block):
    """Full activation checkpointing: the input alone is kept, and the block computed again in backward."""

    def forward(self, *x):
        return checkpoint(super().forward, *x, use_reentrant=False)


class Selective(Block):
    """Selective activation checkpointing, as torchtitan's "op": attention and every second matrix product are kept."""

    def forward(self, *x):
        return checkpoint(super().forward, *x, use_reentrant=False, context_fn=keep_some)


def keep_some():
    products = {"forward": 0, "again": 0}

    def policy(context, operation, *args, **kwargs):
        keep = "attention" in str(operation)
        if operation is torch.ops.aten.mm.default:
            when = "again" if context.is_recompute else "forward"
            products[when] += 1
            keep = products[when] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    def __init__(self, layers, dim, heads, kv_heads, hidden, words, length, block=Block, norm=nn.RMSNorm):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(block(dim, heads, kv_heads, hidden, norm) for _ in range(layers))
        self.norm, self.output = norm(dim), nn.Linear(dim, words, bias=False)
        self.register_buffer("turns", angles(length, dim // heads), persistent=False)

    def forward(self, text):
        x = self.words(text)
        for block in self.blocks:
            x = block(x, self.turns[: text.shape[1]])
        return self.output(self.norm(x))


def tensor_parallel(model, mesh):
    """Cut a Llama's layers over a mesh of one dimension: tensor parallel with sequence parallel between the cut layers. The scores come out
    cut by words (a DTensor), for a loss under `loss_parallel`; a text's length has to be a multiple of the mesh's size."""
    whole, tokens = Replicate(), Shard(1)
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=tokens)
    in_block = {f"attention.{name}": column for name in "qkv"} | {"attention.out": row}
    in_block |= {"feed_forward.gate": column, "feed_forward.up": column, "feed_forward.down": row}
    in_block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for name, rest in {"attention": (None,), "feed_forward": ()}.items():
        in_block[name] = PrepareModuleInput(input_layouts=(tokens, *rest), desired_input_layouts=(whole, *rest))
    around = {
        "words": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, in_block)
    return parallelize_module(model, mesh, around)
