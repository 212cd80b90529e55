"""A Llama of 1.0 B parameters: trained whole, by adapters, and a word at a time."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published


class Layer(nn.Module):
    """Of Llama: RMS norm, rotated queries and keys, fewer keys than queries, SwiGLU."""

    def __init__(self, hidden: int, heads: int, groups: int, inner: int):
        super().__init__()
        self.heads, self.groups, width = heads, groups, hidden // heads
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, groups * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.n1, self.n2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def heads_of(self, x, count: int):
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def forward(self, x, cos, sin, cache=None):
        h = self.n1(x)
        q, k, v = (
            self.heads_of(self.q(h), self.heads),
            self.heads_of(self.k(h), self.groups),
            self.heads_of(self.v(h), self.groups),
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        times = self.heads // self.groups
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, groups: int, inner: int, vocabulary: int = 32000):
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(hidden, heads, groups, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, tokens, cos, sin, caches=None):
        x = self.words(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if caches is None else caches[i])
        return self.head(self.norm(x))


def angles(length: int, width: int, dtype: torch.dtype):
    turns = torch.outer(torch.arange(length, device="cuda"), 10000 ** -torch.linspace(0, 1, width // 2, device="cuda"))
    turns = torch.cat([turns, turns], dim=1)
    return turns.cos().to(dtype), turns.sin().to(dtype)


SMALL = {"layers": 16, "hidden": 2048, "heads": 32, "groups": 8, "inner": 5632}  # 1.0 B parameters


def llama(row: Published) -> Step:
    dtype = torch.bfloat16 if row.precision == "bfloat16" else torch.float32
    with torch.device("cuda"):
        model = Llama(**SMALL).to(dtype)
        tokens = torch.randint(0, 32000, (row.batch, row.size))
    cos, sin = angles(row.size, 64, dtype)
    if row.mode == "infer":
        rows = [torch.randn(row.batch, 8, row.size, 64, device="cuda", dtype=dtype) for _ in range(2)]
        cos, sin, caches = cos[-1:], sin[-1:], [rows] * 16

        def step():
            with torch.inference_mode():
                return model(tokens[:, -1:], cos, sin, caches)[:, -1].argmax(-1)

        return step

    def loss():
        return F.cross_entropy(model(tokens, cos, sin).flatten(0, 1), tokens.flatten())

    if "adapters" in row.options:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for layer in model.layers:
            layer.q, layer.v = Adapted(layer.q), Adapted(layer.v)
        model.cuda().to(dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return training(parameters, loss, row, torch.optim.AdamW)


class Adapted(nn.Module):
    """LoRA: what a layer gives, and a product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 16):
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.05)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + 2 * self.b(self.a(self.drop(x)))
