"""Llama as torchtitan trains it (github.com/pytorch/torchtitan), written from its settings: FSDP2, bf16 with float32 reductions,
activation checkpointing, AdamW by foreach. For a dry run: weights are never initialised."""

import contextlib
import functools
import math
import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import virtualgpu
from tests.accuracy.published import Published

GIB = 2**30
HOST = "2024"  # what the clock takes for the processor, by the date


@dataclass(frozen=True)
class Llama:
    """Sizes of a model. float_in_model: until October 2024 the model made float32 of its logits, and they were kept until the next
    step; from then on the loss does it, and the bf16 logits are deleted before the backward pass (torchtitan's e10cb9494)."""

    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    layers: int = 32
    float_in_model: bool = False


LLAMA2_7B = Llama(kv_heads=32, hidden=11008, vocabulary=32000, float_in_model=True)
LLAMA3_8B = Llama()
LLAMA3_70B = Llama(dim=8192, heads=64, hidden=28672, layers=80)
SIZES = {"llama2_7b": LLAMA2_7B, "llama3_8b": LLAMA3_8B, "llama3_70b": LLAMA3_70B}


class Norm(nn.Module):
    """RMSNorm in plain operations and float32, as torchtitan had it until March 2025 (its pull request 985)."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotate(x, turns):
    """Rotary embedding of x (batch, sequence, heads, size): pairs as complex numbers, in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, sizes: Llama):
        super().__init__()
        self.size, narrow = sizes.dim // sizes.heads, sizes.dim // sizes.heads * sizes.kv_heads
        self.repeats = sizes.heads // sizes.kv_heads
        self.q, self.k, self.v = linear(sizes.dim, sizes.dim), linear(sizes.dim, narrow), linear(sizes.dim, narrow)
        self.out = linear(sizes.dim, sizes.dim)

    def forward(self, x, turns):
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.size) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, turns), rotate(k, turns)
        if self.repeats > 1:
            k, v = (
                y[:, :, :, None, :].expand(-1, -1, -1, self.repeats, -1).reshape(batch, length, -1, self.size)
                for y in (k, v)
            )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Llama):
        super().__init__()
        self.gate, self.up = linear(sizes.dim, sizes.hidden), linear(sizes.dim, sizes.hidden)
        self.down = linear(sizes.hidden, sizes.dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Llama):
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.attention_norm, self.feed_forward_norm = Norm(sizes.dim), Norm(sizes.dim)

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(self, sizes: Llama, turns: tuple[int, int]):
        super().__init__()
        self.sizes = sizes
        self.embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.output = Norm(sizes.dim), linear(sizes.dim, sizes.vocabulary)
        self.register_buffer("turns", torch.empty(*turns, dtype=torch.complex64), persistent=False)

    def forward(self, tokens):
        turns = self.turns[: tokens.shape[1], None]
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        x = self.output(self.norm(x))
        return x.float() if self.sizes.float_in_model else x


ATEN = torch.ops.aten
SAVED = {  # torchtitan's list of what selective checkpointing keeps
    ATEN.mm.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def keep_every_second_product():
    """torchtitan's selective checkpointing "op": attention and every second matrix product are kept, the rest is computed again."""
    products = {True: 0, False: 0}

    def policy(context, function, *args, **kwargs):
        keep = function in SAVED
        if function is ATEN.mm.default:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(block: nn.Module, index: int, how: str) -> nn.Module:
    """how: "none", "full", "op", or "layer 2" (every second block in full)."""
    if how == "op":
        return checkpoint_wrapper(block, context_fn=keep_every_second_product, preserve_rng_state=False)
    if how == "full" or (how.startswith("layer ") and (index + 1) % int(how.removeprefix("layer ")) == 0):
        return checkpoint_wrapper(block, preserve_rng_state=False)
    return block


def sharded(sizes: Llama, length: int, how: str, reshard: str) -> nn.Module:
    """reshard: torchtitan's "default" (all but the last block), "always" or "never" after the forward pass."""
    with torch.device("meta"):
        model = Transformer(sizes, (length, sizes.dim // sizes.heads // 2))
    shard = functools.partial(
        fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    for index, block in enumerate(model.layers):
        last = index == len(model.layers) - 1
        block = model.layers[index] = checkpointed(block, index, how)
        shard(block, reshard_after_forward=reshard == "always" or (reshard == "default" and not last))
    shard(model)
    return model.to_empty(device="cuda")


@contextlib.contextmanager
def allocator(expandable: bool):
    """PYTORCH_CUDA_ALLOC_CONF for virtual GPUs that begin inside."""
    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
        else:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = before


@dataclass
class Told:
    """Of the last step: seconds, and peaks in GiB."""

    seconds: float
    active: float
    reserved: float


def train(
    sizes: Llama,
    batch: int,
    length: int,
    world_size: int,
    like: str = "H100-96GB",
    how: str = "op",
    reshard: str = "default",
    fused: bool = False,
    expandable: bool = False,
    steps: int = 2,
) -> Told:
    """Some steps of one rank of world_size in a dry run; peaks are counted from the first step on, as torchtitan's log does.

    expandable: as torchtitan's run_llama_train.sh sets it (by December 2024, not yet in June); its script for several nodes does not. From
    the second step on, when the optimizer has its state, steps are alike.
    """
    with allocator(expandable), virtualgpu.dry_run(like=like, world_size=world_size, host=HOST):
        dist.init_process_group("nccl")
        model = sharded(sizes, length, how, reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused, foreach=not fused)
        torch.cuda.reset_peak_memory_stats()
        clock, seconds = virtualgpu.machine().clock, math.nan
        for _ in range(steps):
            torch.cuda.synchronize()
            start = clock.host
            tokens, labels = (torch.zeros(batch, length, dtype=torch.int64).cuda() for _ in range(2))
            optimizer.zero_grad()
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits if sizes.float_in_model else logits.float(), labels.flatten(0, 1))
            if not sizes.float_in_model:
                del logits  # as torchtitan does from 2024-10 on
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            torch.cuda.synchronize()
            seconds = clock.host - start
        told = torch.cuda.memory_stats()
        return Told(seconds, told["active_bytes.all.peak"] / GIB, told["reserved_bytes.all.peak"] / GIB)


def as_published(row: Published, float_in_model: bool = False, expandable: bool = False) -> Told:
    """The same with the settings of a row. torchtitan puts cuDNN's attention first from B200 on; an H100 has flash
    (torchtitan/models/attention.py, 2025)."""
    sizes, options = SIZES[row.model], row.options
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return train(
            replace(sizes, float_in_model=float_in_model or sizes.float_in_model),
            row.batch,
            row.size,
            row.gpus,
            like=row.card,
            how=options["checkpointing"],
            reshard=options.get("reshard", "default"),
            fused=options.get("optimizer") == "fused",
            expandable=expandable,
        )
