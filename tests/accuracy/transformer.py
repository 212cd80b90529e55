"""Transformers on one GPU: GPT-2 made faster step by step, BERT as milabench and NeuSight timed it, and the memory of a ViT-L/16.

Settings: a row of published.csv each. GPT-2 124M from "Build a Large Language Model (From Scratch)", 1024 tokens, dropout .1: its
LayerNorm, GELU and attention in plain operations, then PyTorch's, AdamW; its tokens/s have two evaluated batches in 15 steps. BERT for
masked words, 512 tokens: base with fused attention and Adam, gradients never set to zero (milabench: its memory is nvidia-smi's, so the
difference between two batches is judged; batch 1 and every third of its batches, or those that figures began with), large in plain
operations, forward and backward alone (NeuSight). ViT-L/16 is torchvision's with 10 classes and Adam, gradients dropped between forward and
backward, FlashAttention 1 in 16 bits. All are ours, from these settings.
"""

import contextlib
import dataclasses
import itertools
import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import virtualgpu
from tests.accuracy.before import flash_attention
from tests.accuracy.published import Published, Row, program, published, ratio
from tests.accuracy.vision import NARROW, name, prepare

GPT2 = {  # options: AdamW fused, mask made on the fly, native LayerNorm and GELU, fused attention; each with those before
    "gpt2": 0,
    "gpt2 mask on the fly": 1,
    "gpt2 fused AdamW": 2,
    "gpt2 native classes": 3,
    "gpt2 flash attention": 4,
}
ON_THE_FLY, FUSED, NATIVE, FLASH = range(1, 5)
EVERY, EVALUATED = 15, 2  # steps, and batches evaluated after so many
BERT = {"bert_base": (768, 12, 12), "bert_large": (1024, 16, 24)}  # hidden, heads, layers
FLASH_2 = "2024-01"  # PyTorch 2.2
VOCABULARY, DROPOUT = {"gpt2": 50257, "bert": 30522}, 0.1


class PlainNorm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class PlainGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Of GPT-2 (causal), with the options up to `level`."""

    def __init__(self, hidden: int, heads: int, length: int, level: int):
        super().__init__()
        self.heads, self.level = heads, level
        parts = (
            [nn.Linear(hidden, 3 * hidden, bias=False)]
            if level >= FLASH
            else [nn.Linear(hidden, hidden, bias=False) for _ in range(3)]
        )
        self.parts, self.out = nn.ModuleList(parts), nn.Linear(hidden, hidden)
        if level < ON_THE_FLY:
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x):
        batch, length, hidden = x.shape
        if self.level >= FLASH:
            q, k, v = self.parts[0](x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT * self.training, is_causal=True)
        else:
            q, k, v = (part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in self.parts)
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1) if self.level else self.mask
            scores = (q @ k.transpose(2, 3)).masked_fill_(mask.bool(), -torch.inf)
            mixed = F.dropout(torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1), DROPOUT, self.training) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, length: int, level: int):
        super().__init__()
        norm, gelu = (nn.LayerNorm, nn.GELU("tanh")) if level >= NATIVE else (PlainNorm, PlainGELU())
        self.norms = nn.ModuleList(norm(hidden) for _ in range(2))
        self.attention = Attention(hidden, heads, length, level)
        self.feed = nn.Sequential(nn.Linear(hidden, 4 * hidden), gelu, nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        x = F.dropout(self.attention(self.norms[0](x)), DROPOUT, self.training) + x
        return F.dropout(self.feed(self.norms[1](x)), DROPOUT, self.training) + x


class GPT(nn.Module):
    def __init__(self, length: int, level: int, hidden: int = 768, heads: int = 12, layers: int = 12):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY["gpt2"], hidden), nn.Embedding(length, hidden)
        self.blocks = nn.Sequential(*[Block(hidden, heads, length, level) for _ in range(layers)])
        self.norm = (nn.LayerNorm if level >= NATIVE else PlainNorm)(hidden)
        self.head = nn.Linear(hidden, VOCABULARY["gpt2"], bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(F.dropout(x, DROPOUT, self.training))))


class Encoder(nn.Module):
    """A layer of BERT, its attention fused or in plain operations."""

    def __init__(self, hidden: int, heads: int, fused: bool):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, eps=1e-12) for _ in range(2))

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            mixed = F.dropout(F.softmax(scores, dim=-1), DROPOUT) @ v
        x = self.norms[0](F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), DROPOUT) + x)
        return self.norms[1](F.dropout(self.down(F.gelu(self.up(x))), DROPOUT) + x)


class Bert(nn.Module):
    """For masked words: the head has the words' own weight."""

    def __init__(self, hidden: int, heads: int, layers: int, fused: bool, length: int = 512):
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, hidden) for n in (VOCABULARY["bert"], length, 2))
        self.norm, self.last = (nn.LayerNorm(hidden, eps=1e-12) for _ in range(2))
        self.layers = nn.Sequential(*[Encoder(hidden, heads, fused) for _ in range(layers)])
        self.dense, self.bias = nn.Linear(hidden, hidden), nn.Parameter(torch.zeros(VOCABULARY["bert"]))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.kinds(torch.zeros_like(tokens)) + self.places(places)
        x = self.last(F.gelu(self.dense(self.layers(F.dropout(self.norm(x), DROPOUT)))))
        return F.linear(x, self.words.weight, self.bias)


def words(row: Published):
    """A step of a language model, and a batch evaluated, as functions. Inside a dry run."""
    torch.backends.cuda.matmul.allow_tf32 = row.precision == "tf32"
    if row.model in GPT2:
        level = GPT2[row.model]
        model = GPT(row.size, level)
    else:
        level, model = None, Bert(*BERT[row.model], fused=row.model == "bert_base")
    model = model.cuda().to(NARROW.get(row.precision, torch.float32))
    if row.model in GPT2:
        optimizer = torch.optim.AdamW(model.parameters(), fused=level >= FUSED or None)
    else:
        optimizer = torch.optim.Adam(model.parameters()) if row.model == "bert_base" else None

    def forward():
        tokens, labels = (torch.zeros(row.batch, row.size, dtype=torch.int64).cuda() for _ in range(2))
        with torch.autocast("cuda", torch.float16, enabled=row.precision == "AMP"):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits if row.model == "bert_base" else None  # transformers returns both

    scaler = torch.amp.GradScaler("cuda", enabled="scaler" in row.options)

    def step():
        if "gradients" not in row.options:
            model.zero_grad()
        output = forward()  # logits and all live in the backward pass as well
        scaler.scale(output[0]).backward()
        if optimizer:
            scaler.step(optimizer)
            scaler.update()

    def evaluate():
        model.eval()
        with torch.no_grad():
            forward()[0].item()
        model.train()

    return step, evaluate


def pictures(row: Published):
    """The same of ViT-L/16 with 10 classes and Adam."""
    model, _ = prepare(row, num_classes=10)
    kind = torch.optim.SGD if row.options.get("optimizer") == "SGD" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=5e-5)
    batch = torch.randn(row.batch, 3, row.size, row.size, device="cuda", dtype=NARROW.get(row.precision, torch.float32))
    labels = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    older = row.precision != "float32" and row.date < FLASH_2

    def step():
        attention = mock.patch.object(F, "scaled_dot_product_attention", flash_attention)
        with (
            attention if older else contextlib.nullcontext(),
            torch.autocast("cuda", torch.float16, enabled=row.precision == "AMP"),
        ):
            loss = F.cross_entropy(model(batch), labels)
        if "accumulated" not in row.options:
            optimizer.zero_grad()  # as the script has it: the last gradients are there in the forward pass
        loss.backward()
        optimizer.step()

    return step, None


def measure(row: Published) -> tuple[float, int]:
    """Seconds of a step, evaluation's share with it, and bytes reserved."""
    with virtualgpu.dry_run(1, like=row.card, host=row.host):
        try:
            step, evaluate = (pictures if row.model.startswith("vit") else words)(row)
            clock, taken = virtualgpu.machine().clock, []
            for work in (step, step, *([evaluate] if row.model in GPT2 else [])):
                torch.cuda.synchronize()
                start = clock.host
                work()
                torch.cuda.synchronize()
                taken.append(clock.host - start)
            share = EVALUATED / EVERY * taken[2] if row.model in GPT2 else 0
            return taken[1] + share, torch.cuda.max_memory_reserved()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False


def simulated(row: Published, seconds: float, reserved: int) -> float:
    if row.kind == "memory":
        return reserved / {"MiB": 2**20, "GiB": 2**30, "GB": 1e9}[row.unit]
    if row.kind == "time":
        return 1000 * seconds
    return row.batch * (row.size if row.unit == "tokens/s" else 1) / seconds


def between(before: Row, after: Row) -> Row:
    """What the larger batch takes more: nvidia-smi's figures have the context with them."""
    more = after.published - before.published, after.simulated - before.simulated
    return dataclasses.replace(
        after, what=f"{after.what}, more than the batch before", published=more[0], simulated=more[1]
    )


@program("https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/10_llm-training-speed")
def transformer() -> list[Row]:
    """As the module says."""
    found, taken, occupied = [], {}, {}
    for row in published("transformer"):
        if row.run not in taken:
            taken[row.run] = measure(row)
        what = f"{name(row)}: reserved" if row.kind == "memory" else name(row)
        result = row.beside(what, simulated(row, *taken[row.run]))
        if row.options.get("figure") == "nvidia-smi":
            occupied.setdefault((row.card, row.model, row.precision), []).append(result)
        else:
            found.append(result)
    speeds = [row for row in found if row.kind == "speed" and row.group == "LLMs-from-scratch"]
    for before, after in itertools.pairwise(speeds):
        found.append(ratio(f"speed against the row before: {after.what}", after, before))
    return [*found, *(between(*pair) for batches in occupied.values() for pair in itertools.pairwise(batches))]
