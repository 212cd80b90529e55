"""Llama 2 7B with LoRA by FSDP on two RTX 3090 (AnswerDotAI/fsdp_qlora, March 2024): memory reserved at the peak.

Settings: a row of published.csv each, all of the page that are neither quantized nor offloaded: bfloat16 throughout, LoRA of rank 64 with
dropout .1 on all but the attention's output, FSDP with a unit for each block and each adapter, blocks checkpointed (reentrant), AdamW by
foreach, gradients clipped; "NO_SHARD" is what the page calls ddp. The model is ours, as transformers had it in 2024: norm and logits in
float32, rotary embedding in halves. Its times are of runs whose length the page does not say.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

import virtualgpu
from tests.accuracy.llama import GIB, FeedForward, linear
from tests.accuracy.llama import LLAMA2_7B as SIZES
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row

URL = "https://github.com/AnswerDotAI/fsdp_qlora/blob/main/benchmarks_03_2024.md"
RANK, ALPHA, DROPOUT, CLIPPED = 64, 16, 0.1, 0.3


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZES.dim))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(DROPOUT)
        self.down, self.up = linear(base.in_features, RANK), linear(RANK, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * (ALPHA / RANK)


def turn(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (Adapted(linear(SIZES.dim, SIZES.dim)) for _ in range(3))
        self.out, self.size = linear(SIZES.dim, SIZES.dim), SIZES.dim // SIZES.heads

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        angles = torch.zeros(x.shape[1], self.size, device=x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mixed = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.attention, self.feed = Attention(), FeedForward(SIZES)
        for name, layer in list(self.feed.named_children()):
            setattr(self.feed, name, Adapted(layer))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


class Llama(nn.Module):
    """forward gives the loss and the logits, as transformers' does; the script holds both in the backward pass."""

    def __init__(self):
        super().__init__()
        self.words, self.output = nn.Embedding(SIZES.vocabulary, SIZES.dim), linear(SIZES.dim, SIZES.vocabulary)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(SIZES.layers)]), Norm()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".down.weight", ".up.weight")))  # the adapters' alone

    def forward(self, tokens):
        x = self.words(tokens).requires_grad_()
        logits = self.output(self.norm(self.blocks(x))).float()
        return F.cross_entropy(logits[:, :-1].contiguous().flatten(0, 1), tokens[:, 1:].flatten()), logits


def reserved(row: Published, steps: int = 2) -> float:
    """GiB, the peak of one rank in some steps."""
    with virtualgpu.dry_run(like=row.card, world_size=row.gpus, host=row.host):
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = Llama().bfloat16()
        adapters = {part for layer in model.modules() if isinstance(layer, Adapted) for part in (layer.down, layer.up)}
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[row.options["sharding"]],
            auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, Block) or module in adapters),
            device_id=torch.cuda.current_device(),
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        )
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
        apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, Block))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for _ in range(steps):
            output = model(torch.zeros(row.batch, row.size, dtype=torch.int64).cuda())
            output[0].backward()
            model.clip_grad_norm_(CLIPPED)
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
        return torch.cuda.max_memory_reserved() / GIB


def rows() -> list[Row]:
    return [
        row.beside(
            f"Llama 2 7B, LoRA, FSDP {row.options['sharding']}, 2 RTX 3090, context {row.size}, batch {row.batch}: reserved",
            reserved(row),
        )
        for row in published("lora")
    ]
