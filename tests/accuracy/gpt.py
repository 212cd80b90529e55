"""GPT and BERT as programs of several years wrote them: what differs is how queries, keys and values are mixed, and what is joined to it."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.accuracy.before import softmax

DROPOUT = 0.1


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT)


def plain(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return F.dropout(F.softmax(scores, dim=-1), DROPOUT) @ v


def masked(q, k, v, mask):
    """Until PyTorch 1.10."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return F.dropout(softmax(scores), DROPOUT) @ v


def tanh(x):
    return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    """Of a GPT. mix: of queries, keys and values [batch, heads, length, size], what attention gives."""

    mix, gelu = staticmethod(causal), staticmethod(F.gelu)

    def __init__(self, hidden: int, heads: int, *, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias), nn.Linear(hidden, hidden, bias)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias), nn.Linear(4 * hidden, hidden, bias)

    def split(self, x):
        return (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))

    def attend(self, x):
        q, k, v = self.split(x)  # by name, as programs have them: held until this returns
        return self.out(self.mix(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1))

    def forward(self, x):
        x = x + self.drop(self.attend(self.norms[0](x)))
        return x + self.drop(self.down(self.gelu(self.up(self.norms[1](x)))))


class GPT(nn.Module):
    """forward gives the logits. tied: the head has the words' own weight."""

    def __init__(self, vocabulary: int, length: int, hidden: int, blocks, *, norm=nn.LayerNorm, dropout=0.0, tied=True):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks, self.norm, self.drop = nn.Sequential(*blocks), norm(hidden), nn.Dropout(dropout)
        self.head = None if tied else nn.Linear(hidden, vocabulary, bias=False)
        self.recompute = False

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        if self.drop.p:
            _embedded, x = x, self.drop(x)  # held until this returns, as programs have it by name
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x)) if self.head else F.linear(self.norm(x), self.words.weight)
        return self.given(logits, tokens)

    def given(self, logits, tokens):
        return logits


class OldBlock(Block):
    """Of transformers' GPT-2 until 2022, in plain operations: each block has its mask."""

    def __init__(self, hidden: int, heads: int, length: int):
        super().__init__(hidden, heads, dropout=DROPOUT)
        self.register_buffer("seen", torch.ones(length, length, dtype=torch.bool).tril(), persistent=False)

    def mix(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = self.seen[: scores.shape[-1], : scores.shape[-1]]
        scores = torch.where(seen, scores, torch.full((), -1e4, device=scores.device))
        return F.dropout(F.softmax(scores, dim=-1), DROPOUT) @ v

    @staticmethod
    def gelu(y):
        return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3))))


# "Build a Large Language Model (From Scratch)", step by step: each has what those before it have
ON_THE_FLY, FUSED_ADAMW, NATIVE, FLASH = range(1, 5)


class PlainNorm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class FromScratch(Block):
    """A block at that level."""

    def __init__(self, hidden: int, heads: int, length: int, level: int):
        super().__init__(hidden, heads, dropout=DROPOUT)
        self.level = level
        if level < NATIVE:
            self.norms = nn.ModuleList(PlainNorm(hidden) for _ in range(2))
        widths = [3 * hidden] if level >= FLASH else [hidden] * 3
        self.qkv = nn.ModuleList(nn.Linear(hidden, width, bias=False) for width in widths)
        if level < ON_THE_FLY:
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def gelu(self, x):
        if self.level >= NATIVE:
            return tanh(x)
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))))

    def attend(self, x):
        batch, length, hidden = x.shape
        if self.level >= FLASH:
            q, k, v = self.qkv[0](x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT * self.training, is_causal=True)
        else:
            q, k, v = (part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv)
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1) if self.level else self.mask
            scores = (q @ k.transpose(2, 3)).masked_fill_(mask.bool(), -torch.inf)
            mixed = self.drop(torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1)) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


def from_scratch(length: int, level: int, hidden: int = 768, heads: int = 12, layers: int = 12) -> GPT:
    blocks = [FromScratch(hidden, heads, length, level) for _ in range(layers)]
    norm = nn.LayerNorm if level >= NATIVE else PlainNorm
    return GPT(50257, length, hidden, blocks, norm=norm, dropout=DROPOUT, tied=False)


class Encoder(nn.Module):
    """A layer of BERT. mix: as a block's, of what else a layer is given as well."""

    def __init__(self, hidden: int, heads: int, mix):
        super().__init__()
        self.heads, self.mix = heads, mix
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, eps=1e-12) for _ in range(2))

    def forward(self, x, *mask):
        q, k, v = (part(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.mix(q, k, v, *mask).transpose(1, 2).reshape(x.shape)
        x = self.norms[0](F.dropout(self.out(mixed), DROPOUT) + x)
        return self.norms[1](F.dropout(self.down(F.gelu(self.up(x))), DROPOUT) + x)


class Bert(nn.Module):
    """For masked words: the head has the words' own weight."""

    def __init__(self, hidden: int, heads: int, layers: int, mix, vocabulary: int = 30522, length: int = 512):
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, hidden) for n in (vocabulary, length, 2))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.Sequential(*[Encoder(hidden, heads, mix) for _ in range(layers)])
        self.add_head(hidden, vocabulary)

    def add_head(self, hidden: int, vocabulary: int) -> None:
        self.dense, self.last = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def embedded(self, tokens, places):
        x = self.words(tokens) + self.kinds(torch.zeros_like(tokens)) + self.places(places)
        return F.dropout(self.norm(x), DROPOUT)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.last(F.gelu(self.dense(self.layers(self.embedded(tokens, places)))))
        return F.linear(x, self.words.weight, self.bias)


class Classifier(Bert):
    """Of texts, two classes; a mask for the whole batch."""

    recompute = False

    def add_head(self, hidden: int, vocabulary: int) -> None:
        self.pool, self.head = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def forward(self, tokens):
        x = self.embedded(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None])
        mask = torch.zeros(tokens.shape[0], 1, 1, tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=True) if self.recompute else layer(x, mask)
        return self.head(F.dropout(torch.tanh(self.pool(x[:, 0])), DROPOUT))
