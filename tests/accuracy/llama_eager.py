"""Llama 3.2 1B and 3.1 8B of transformers on a B200, eager (stas00/ml-engineering, 2026): forward, with backward, with AdamW's step.

Settings: a row of published.csv each, all of the page that are not compiled: bfloat16, one sequence of 512 or 8192 tokens, "forward" without
gradients, the others with every block checkpointed and gradients set to None, AdamW by foreach. The model is ours, as transformers has it:
norm and loss in float32, rotary embedding in halves, keys and values of eight heads repeated by the attention.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import virtualgpu
from tests.accuracy.llama import LLAMA3_8B, FeedForward, Llama, Norm, linear
from tests.accuracy.lora import turn
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row

URL = "https://github.com/stas00/ml-engineering/blob/master/training/performance/README.md"
SIZES = {"llama3_1b": Llama(dim=2048, hidden=8192, layers=16), "llama3_8b": LLAMA3_8B}
TIED = "llama3_1b"  # the head has the words' own weight


class Block(nn.Module):
    def __init__(self, sizes: Llama):
        super().__init__()
        self.size = sizes.dim // sizes.heads
        self.q, self.out = linear(sizes.dim, sizes.dim), linear(sizes.dim, sizes.dim)
        self.k, self.v = (linear(sizes.dim, self.size * sizes.kv_heads) for _ in range(2))
        self.norms = nn.ModuleList(Norm(sizes.dim) for _ in range(2))
        self.feed = FeedForward(sizes)

    def attend(self, x, cos, sin):
        q, k, v = (part(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.norms[0](x), cos, sin)
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, sizes: Llama, tied: bool):
        super().__init__()
        self.words, self.norm = nn.Embedding(sizes.vocabulary, sizes.dim), Norm(sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head, self.size = None if tied else linear(sizes.dim, sizes.vocabulary), sizes.dim // sizes.heads

    def forward(self, tokens):
        """The logits."""
        x = self.words(tokens)
        angles = torch.zeros(tokens.shape[1], self.size, device=tokens.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.training else block(x, cos, sin)
        x = self.norm(x)
        return self.head(x) if self.head else F.linear(x, self.words.weight)


def seconds(row: Published, steps: int = 2) -> float:
    """Of the last step."""
    work = row.options["work"]
    with virtualgpu.dry_run(1, like=row.card, host=row.host):
        with torch.device("meta"):
            model = Model(SIZES[row.model], row.model == TIED).bfloat16()
        model = model.to_empty(device="cuda").train(work != "forward")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if "AdamW" in work else None
        tokens, clock = torch.zeros(row.batch, row.size, dtype=torch.int64, device="cuda"), virtualgpu.machine().clock
        for _ in range(steps):
            torch.cuda.synchronize()
            start = clock.host
            if work == "forward":
                with torch.no_grad():
                    model(tokens)
            else:
                model.zero_grad()
                labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
                F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten()).backward()
            if optimizer:
                optimizer.step()
            torch.cuda.synchronize()
            took = clock.host - start
    return took


def rows() -> list[Row]:
    return [
        row.beside(f"{row.model}, {row.size} tokens, {row.card}: {row.options['work']}", 1000 * seconds(row))
        for row in published("llama_eager")
    ]
