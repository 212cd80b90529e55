"""The graders of notebook 10: a plan for tensor parallel, a model on two T4s, and groups of parameters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from tests.processes import no_end

SIZES = {"dim": 256, "words": 40000, "length": 16}
BUDGET = 0.21  # GiB, between one group for both of the large layers and a group for each


pytestmark = pytest.mark.usefixtures("no_gpus_before")


class Bottleneck(nn.Module):
    def __init__(self, dim=64, hidden=256):
        super().__init__()
        self.narrow, self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(torch.tanh(self.narrow(x)))))


class Endless(Bottleneck):
    def forward(self, x):
        no_end()


def plan(**styles):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    known = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
    known["whole"] = ColwiseParallel(output_layouts=Replicate())
    known["columns in words"] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))
    known["rows in words"] = RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    return {name: known[style] for name, style in styles.items()}


@pytest.mark.parametrize("styles, said", [
    ({"up": "whole", "down": "whole"}, "forward needs {'all_gather_into_tensor': 2}; one all-reduce"),
    ({"up": "columns"}, "forward raised RuntimeError: "),
    ({"up": "rows", "down": "columns"}, "with this plan, forward raised "),
    ({"narrow": "columns", "up": "columns", "down": "rows"}, "with this plan, forward raised "),
    ({}, "rank 0 holds 100% of up's weight"),
    ({"middle": "rows"}, "the plan names ['middle']; the layers are ['narrow', 'up', 'down']"),
    ({"m*": "rows"}, "the plan names ['m*']"),
    (None, "the plan is None; a dictionary is wanted"),
    ({"up": "columns", "down": "rows"}, "[passed]"),
    ({"u*": "columns", "d*": "rows"}, "[passed]"),
    ({"[a-u]p": "columns", "d???": "rows in words"}, "[passed]"),
    ({"down": "rows in words", "up": "columns in words"}, "[passed]"),
])  # fmt: skip
def test_tensor_plan(says, styles, said):
    """Each complaint is alone: what DTensor logs of an error (two tracebacks a rank) is not shown."""
    says(said, checks.tensor_plan, None if styles is None else plan(**styles), Bottleneck)


def test_a_layer_without_an_end_is_told(says):
    says("after 60 seconds ... forward come to an end?", checks.tensor_plan, plan(up="columns", down="rows"), Endless)


class Model(nn.Module):
    def __init__(self, dim, words, length):
        super().__init__()
        self.words, self.output = nn.Embedding(words, dim), nn.Linear(dim, words, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, text):
        x = self.words(text)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.output(x)


def groups(*names):
    def shard(model):
        from torch.distributed.fsdp import fully_shard

        for name in names:
            fully_shard(getattr(model, name))
        return fully_shard(model)

    return shard


def none_at_all(model):
    return model


def smaller(model):
    model.output = nn.Linear(256, 100, bias=False)
    return groups("words")(model)


def half(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return groups()(model)


def every_matrix(model):
    from torch.distributed.fsdp import fully_shard

    for part in model.modules():
        if next(part.parameters(recurse=False), None) is not None:
            fully_shard(part)
    return fully_shard(model)


def the_last_two_together(model):
    """As torchtitan has it: the root keeps nothing."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.words)
    fully_shard(list(model.blocks))
    fully_shard(model.output, reshard_after_forward=False)
    return fully_shard(model)


@pytest.mark.parametrize("shard, said", [
    (groups(), "all is sharded, and a step's peak is"),
    (groups("words"), "all is sharded, and a step's peak is"),
    (none_at_all, "words.weight is not sharded: each of the four GPUs"),
    (smaller, "look at output.weight"),
    (half, "look at words.weight"),
    (no_end, "after 300 seconds"),
    (groups("words", "output"), "[passed]"),
    (every_matrix, "[passed]"),
    (the_last_two_together, "[passed]"),
])  # fmt: skip
def test_shards_below(says, shard, said):
    says(said, checks.shards_below, shard, Model, SIZES, BUDGET)


# Three billion in few layers, and of short texts: as large for a T4 as the lesson's, and sooner worked through
THREE = {"layers": 7, "dim": 6144, "heads": 48, "kv_heads": 16, "hidden": 14336, "words": 16000, "length": 2048}


def on_two(dtype=None, offload=True, grouped=True, ends=True):
    def shard(model):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        policies = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        if offload:
            policies["offload_policy"] = CPUOffloadPolicy()
        for part in (*ends * (model.words, model.output), *model.blocks) if grouped else ():
            fully_shard(part, **policies)
        return fully_shard(model, **policies)

    return shard


@pytest.mark.parametrize("shard, block, said", [
    (on_two(torch.float16, offload=False), "Full", "out of memory"),
    (on_two(torch.float16, grouped=False), "Full", ""),  # no room; PyTorch 2.11, which does: not as fast as possible
    (on_two(torch.bfloat16), "Full", "s are possible"),
    (none_at_all, "Full", "is not sharded: each of the two GPUs"),
    (half, "Full", "look at words.weight"),
    (on_two(torch.float16), "Full", "[passed]"),
    (on_two(torch.float16), "Block", "[passed]"),  # RMS norm as one kernel keeps no float32 copies
    (on_two(torch.float16, ends=False), "Selective", "[passed]"),
])  # fmt: skip
def test_fits_two_t4s(says, shard, block, said):
    from notebooks.scripts import llama

    says(said, checks.fits_two_t4s, shard, getattr(llama, block), llama.Llama, THREE)
