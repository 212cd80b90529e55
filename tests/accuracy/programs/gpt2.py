"""GPT-2 as nanoGPT has it (no dropout, tied words): 124M, medium, in parts, and with what it saves kept by the host."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.accuracy.programs.step import Step, training
from tests.accuracy.published import Published
from tests.accuracy.vision import autocast


class Block(nn.Module):
    """Of GPT-2."""

    def __init__(self, hidden: int, fused: bool):
        super().__init__()
        self.heads, self.fused = hidden // 64, fused
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def attend(self, x):
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, 64).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1)) * 0.125
            y = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, hidden))

    def forward(self, x):
        x = x + self.attend(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int, length: int, fused: bool, recompute: bool, hidden: int = 768, layers: int = 12):
        super().__init__()
        self.vocabulary, self.recompute = vocabulary, recompute
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks, self.norm = nn.ModuleList(Block(hidden, fused) for _ in range(layers)), nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, self.vocabulary), tokens.view(-1))


def gpt2(row: Published) -> Step:
    options = row.options
    plain, vocabulary = options.get("attention") == "plain", int(options.get("vocabulary", 50304))
    model = GPT2(vocabulary, row.size, not plain, "recompute" in options).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")
    fused = {"foreach" if options["optimizer"].endswith("foreach") else "fused": True}
    return training(model.parameters(), lambda: model(tokens), row, torch.optim.AdamW, **fused)


def medium(row: Published) -> Step:
    """GPT-2 medium, or 124M whose step is made of four smaller batches."""
    parts = int(row.options.get("parts", 1))
    sizes = {"hidden": 1024, "layers": 24} if parts == 1 else {}
    model = GPT2(50304, row.size, fused=True, recompute=False, **sizes).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        for part in tokens.chunk(parts):
            with autocast(row):
                loss = model(part) / parts
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def offloaded(row: Published) -> Step:
    """GPT-2 124M whose saved tensors wait in the host's pinned memory."""
    model = GPT2(50304, row.size, fused=True, recompute=False).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")

    def loss():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(tokens)

    return training(model.parameters(), loss, row, torch.optim.AdamW, fused=True)
