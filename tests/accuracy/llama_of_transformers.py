"""Llama as transformers has it: with LoRA by FSDP, and eager on one GPU. The settings are the functions' docstrings."""

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
from torch.utils.checkpoint import checkpoint

import virtualgpu
from tests.accuracy.llama import GIB, LLAMA2_7B, LLAMA3_8B, FeedForward, Llama, Norm, linear
from tests.accuracy.published import Published, Row, program, published

RANK, ALPHA, DROPOUT, CLIPPED = 64, 16, 0.1, 0.3


class RoundedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(LLAMA2_7B.dim))

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


class AdaptedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (Adapted(linear(LLAMA2_7B.dim, LLAMA2_7B.dim)) for _ in range(3))
        self.out, self.size = linear(LLAMA2_7B.dim, LLAMA2_7B.dim), LLAMA2_7B.dim // LLAMA2_7B.heads

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        angles = torch.zeros(x.shape[1], self.size, device=x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mixed = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(RoundedNorm() for _ in range(2))
        self.attention, self.feed = AdaptedAttention(), FeedForward(LLAMA2_7B)
        for name, layer in list(self.feed.named_children()):
            setattr(self.feed, name, Adapted(layer))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


class AdaptedLlama(nn.Module):
    """forward gives the loss and the logits, as transformers' does; the script holds both in the backward pass."""

    def __init__(self):
        super().__init__()
        self.words, self.output = (
            nn.Embedding(LLAMA2_7B.vocabulary, LLAMA2_7B.dim),
            linear(LLAMA2_7B.dim, LLAMA2_7B.vocabulary),
        )
        self.blocks, self.norm = nn.Sequential(*[AdaptedBlock() for _ in range(LLAMA2_7B.layers)]), RoundedNorm()
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
            model = AdaptedLlama().bfloat16()
        adapters = {part for layer in model.modules() if isinstance(layer, Adapted) for part in (layer.down, layer.up)}
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[row.options["sharding"]],
            auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, AdaptedBlock) or module in adapters),
            device_id=torch.cuda.current_device(),
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        )
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
        apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, AdaptedBlock))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for _ in range(steps):
            output = model(torch.zeros(row.batch, row.size, dtype=torch.int64).cuda())
            output[0].backward()
            model.clip_grad_norm_(CLIPPED)
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
        return torch.cuda.max_memory_reserved() / GIB


@program("https://github.com/AnswerDotAI/fsdp_qlora/blob/main/benchmarks_03_2024.md")
def lora() -> list[Row]:
    """Llama 2 7B with LoRA by FSDP on two RTX 3090 (AnswerDotAI/fsdp_qlora, March 2024): memory reserved at the peak.

    Settings: a row of published.csv each, all of the page that are neither quantized nor offloaded: bfloat16 throughout, LoRA of rank 64 with
    dropout .1 on all but the attention's output, FSDP with a unit for each block and each adapter, blocks checkpointed (reentrant), AdamW by
    foreach, gradients clipped; "NO_SHARD" is what the page calls ddp. The model is ours, as transformers had it in 2024: norm and logits in
    float32, rotary embedding in halves. Its times are of runs whose length the page does not say.
    """
    return [
        row.beside(
            f"Llama 2 7B, LoRA, FSDP {row.options['sharding']}, 2 RTX 3090, context {row.size}, batch {row.batch}: reserved",
            reserved(row),
        )
        for row in published("lora")
    ]


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


def seconds_of_a_step(row: Published, steps: int = 2) -> float:
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


@program("https://github.com/stas00/ml-engineering/blob/master/training/performance/README.md")
def llama_eager() -> list[Row]:
    """Llama 3.2 1B and 3.1 8B of transformers on a B200, eager (stas00/ml-engineering, 2026): forward, with backward, with AdamW's step.

    Settings: a row of published.csv each, all of the page that are not compiled: bfloat16, one sequence of 512 or 8192 tokens, "forward" without
    gradients, the others with every block checkpointed and gradients set to None, AdamW by foreach. The model is ours, as transformers has it:
    norm and loss in float32, rotary embedding in halves, keys and values of eight heads repeated by the attention.
    """
    return [
        row.beside(f"{row.model}, {row.size} tokens, {row.card}: {row.options['work']}", 1000 * seconds_of_a_step(row))
        for row in published("llama_eager")
    ]
