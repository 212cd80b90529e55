"""Llama sharded: by FSDP2 as torchtitan trains it, and with LoRA by FSDP. For dry runs: weights are never initialised."""

import functools
import os
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.accuracy.before import reduced_on_their_stream
from tests.accuracy.llama import (
    LLAMA2_7B,
    LLAMA3_8B,
    LLAMA3_70B,
    Adapted,
    Attention,
    Block,
    ComplexAttention,
    Llama,
    Sizes,
    angles,
)
from tests.accuracy.published import Published, Row, published, ratio
from tests.accuracy.runner import Measured, beside, dry_run, in_unit, measured

SIZES = {"llama2_7b": LLAMA2_7B, "llama3_8b": LLAMA3_8B, "llama3_70b": LLAMA3_70B}
ATEN = torch.ops.aten
SAVED = {  # torchtitan's list of what selective checkpointing keeps
    ATEN.mm.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


class Titan(Llama):
    """torchtitan's, which keeps the turns of all tokens."""

    def __init__(self, sizes: Sizes, length: int):
        super().__init__(sizes, block=lambda sizes: Block(sizes, ComplexAttention(sizes)))
        turns = torch.empty(length, self.size // 2, dtype=torch.complex64)
        self.register_buffer("complex", turns, persistent=False)

    def turns(self, x):
        return (self.complex[: x.shape[1], None],)


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


def fsdp2(sizes: Sizes, length: int, how: str, reshard: str) -> nn.Module:
    """reshard: torchtitan's "default" (all but the last block), "always" or "never" after the forward pass."""
    with torch.device("meta"):
        model = Titan(sizes, length)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.layers):
        last = index == len(model.layers) - 1
        block = model.layers[index] = checkpointed(block, index, how)
        again = reshard == "always" or (reshard == "default" and not last)
        fully_shard(block, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mp_policy=policy)
    return model.to_empty(device="cuda")


def train(row: Published, float_in_model: bool = False, expandable: bool = False, steps: int = 2) -> Measured:
    """Some steps of one rank with the settings of a row; peaks are counted from the first step on, as torchtitan's log does.

    float_in_model: until October 2024 the model made float32 of its logits, and they were kept until the next step; from then on the loss does it,
    and the bf16 logits are deleted before the backward pass (torchtitan's e10cb9494). expandable: as torchtitan's run_llama_train.sh sets
    it (by December 2024, not yet in June); its script for several nodes does not. torchtitan puts cuDNN's attention first from B200 on; an H100
    has flash (torchtitan/models/attention.py, 2025).
    """
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    attention = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with mock.patch.dict(os.environ, allocator), attention, dry_run(row, world_size=row.gpus):
        options, fused = row.options, row.options.get("optimizer") == "fused"
        model = fsdp2(SIZES[row.model], row.size, options["checkpointing"], options.get("reshard", "default"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused, foreach=not fused)
        torch.cuda.reset_peak_memory_stats()
        tokens = labels = logits = loss = None

        def step():
            nonlocal tokens, labels, logits, loss  # as in a loop, they are there until the next step's take their place
            tokens, labels = (torch.zeros(row.batch, row.size, dtype=torch.int64).cuda() for _ in range(2))
            optimizer.zero_grad()
            logits = (model(tokens).float() if float_in_model else model(tokens)).flatten(0, 1)
            loss = F.cross_entropy(logits if float_in_model else logits.float(), labels.flatten(0, 1))
            if not float_in_model:
                logits = None
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()

        return measured(step, steps)


def torchtitan(
    program: str, what: Callable[[Published], str], tolerance: float, **options
) -> tuple[list[Row], list[Row]]:
    """The rows of that program, and of these the speeds. options: of `train`."""

    def named(row: Published) -> str:
        return f"{what(row)}: {row.options.get('figure', 'reserved')}" if row.kind == "memory" else what(row)

    rows = beside(program, functools.partial(train, **options), named, tolerance)
    return rows, [row for row in rows if row.kind == "speed"]


@reduced_on_their_stream()
def torchtitan_pr165() -> list[Row]:
    what = "Llama 2 7B, FSDP2, 8 H100, checkpointing {}".format
    name = "torchtitan_pr165"
    rows, (full, op) = torchtitan(name, lambda row: what(row.options["checkpointing"]), 10, float_in_model=True)
    return [*rows, ratio("Llama 2 7B, speed: checkpointing op against full", op, full, 10)]


def torchtitan_pr822() -> list[Row]:
    what = "Llama 3 8B, batch 1, 8 H100, reshard {}".format
    rows, speeds = torchtitan("torchtitan_pr822", lambda row: what(row.options["reshard"]), 1, expandable=True)
    by = {row.what.rpartition(" ")[2]: row for row in speeds}
    return [*rows, ratio("Llama 3 8B, speed: reshard never against always", by["never"], by["always"], 10)]


def torchtitan_2024_12() -> list[Row]:
    rows, (few, many) = torchtitan("torchtitan_2024_12", lambda row: f"Llama 3.1 8B, FSDP2, {row.gpus} H100", 1)
    first = published("torchtitan_2024_12")[0]
    other = first.beside("the same on 8, expandable segments: reserved", in_unit(first, train(first, expandable=True)))
    other.note = "not judged: the page does not say how the allocator was set"
    return [*rows, other, ratio("Llama 3.1 8B, speed: 128 GPUs against 8", many, few, 10)]


@reduced_on_their_stream()
def torchtitan_a100() -> list[Row]:
    def what(row: Published) -> str:
        how, optimizer = row.options.values()
        size = row.model.removeprefix("llama3_").upper()
        return f"Llama 3 {size}, {row.gpus} A100, checkpointing {how}{', foreach' * (optimizer == 'foreach')}"

    rows, speeds = torchtitan("torchtitan_a100", what, 10, float_in_model=True)
    by, name = {row.what: row for row in speeds}, "Llama 3 {}, {} A100, checkpointing {}".format
    pairs = {
        "8B op against 8B layer 2": (name("8B", 64, "op"), name("8B", 64, "layer 2")),
        "70B full against 8B op": (name("70B", 64, "full"), name("8B", 64, "op")),
        "8B, AdamW fused against foreach": (name("8B", 8, "op"), name("8B", 8, "op, foreach")),
    }
    ratios = [ratio(f"Llama 3, speed: {what}", by[one], by[other], 10) for what, (one, other) in pairs.items()]
    return [*rows, *ratios]


RANK, ALPHA, DROPOUT, CLIPPED = 64, 16, 0.1, 0.3


class AdaptedBlock(Block):
    """Adapters on all but the attention's output. Each block makes its own angles."""

    def __init__(self, sizes: Sizes):
        super().__init__(sizes, Attention(sizes))
        for part in (self.attention, self.feed):
            for name, layer in list(part.named_children()):
                if name != "out":
                    setattr(part, name, Adapted(layer, RANK, ALPHA / RANK, DROPOUT))

    def forward(self, x):
        return super().forward(x, *angles(x, self.attention.size))


class AdaptedLlama(Llama):
    """forward gives the loss and the logits, as transformers' does; the script holds both in the backward pass."""

    def __init__(self, sizes: Sizes):
        super().__init__(sizes, block=AdaptedBlock)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".down.weight", ".up.weight")))  # the adapters' alone
        self.words.register_forward_hook(lambda layer, args, x: x.requires_grad_())

    def turns(self, x):
        return ()

    def forward(self, tokens):
        logits = super().forward(tokens).float()
        return F.cross_entropy(logits[:, :-1].contiguous().flatten(0, 1), tokens[:, 1:].flatten()), logits


def train_adapters(row: Published) -> Measured:
    with dry_run(row, world_size=row.gpus):
        with torch.device("meta"):
            model = AdaptedLlama(LLAMA2_7B).bfloat16()
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

        output = None

        def step():
            nonlocal output  # as in a loop, it is there until the next step's takes its place
            output = model(torch.zeros(row.batch, row.size, dtype=torch.int64).cuda())
            output[0].backward()
            model.clip_grad_norm_(CLIPPED)
            optimizer.step()
            optimizer.zero_grad()

        return measured(step)


def lora() -> list[Row]:
    def what(row: Published) -> str:
        sharding = f"FSDP {row.options['sharding']}, 2 RTX 3090"
        return f"Llama 2 7B, LoRA, {sharding}, context {row.size}, batch {row.batch}: reserved"

    return beside("lora", train_adapters, what)
