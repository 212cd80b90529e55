"""The graders of notebook 09: a plan for tensor parallel, a model on two T4s, and groups of parameters."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from tests.processes import HURRY

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
        while True:
            time.sleep(0.01)


def plan(**styles):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    known = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
    known["whole"] = ColwiseParallel(output_layouts=Replicate())
    return {name: known[style] for name, style in styles.items()}


@pytest.mark.parametrize(
    ("styles", "layer", "said"),
    [
        ({"up": "columns", "down": "rows"}, Bottleneck, "[passed]"),
        ({"up": "whole", "down": "whole"}, Bottleneck, "forward needs {'all_gather_into_tensor': 2}; one all-reduce"),
        ({"up": "columns"}, Bottleneck, "forward raised RuntimeError: "),
        ({}, Bottleneck, "rank 0 holds 100% of up's weight"),
        ({"middle": "rows"}, Bottleneck, "the plan names ['middle']"),
        ({"up": "columns", "down": "rows"}, Endless, f"after {HURRY} seconds"),
    ],
)
def test_a_plan_for_tensor_parallel_is_graded(capsys, styles, layer, said):
    checks.tensor_plan(plan(**styles), layer, timeout=HURRY if layer is Endless else 120)
    assert said in capsys.readouterr().out


def test_a_plan_that_is_none_is_told(capsys):
    checks.tensor_plan(None, Bottleneck)
    assert "the plan is None; a dictionary is wanted" in capsys.readouterr().out


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
    return groups()(model.to(torch.bfloat16))


def no_end(model):
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (groups("words", "output"), "[passed]"),
        (groups(), "all is sharded, and a step's peak is"),
        (none_at_all, "words.weight is not sharded"),
        (smaller, "look at output.weight"),
        (half, "look at words.weight"),
        (no_end, f"after {HURRY} seconds"),
    ],
)
def test_groups_of_parameters_are_graded(capsys, shard, said):
    checks.shards_below(shard, Model, SIZES, BUDGET, timeout=HURRY if shard is no_end else 120)
    assert said in capsys.readouterr().out


THREE = {"layers": 28, "dim": 3072, "heads": 24, "kv_heads": 8, "hidden": 8192, "words": 32000, "length": 4096}


def on_two(dtype=None, offload=True, grouped=True):
    def shard(model):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        policies = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        if offload:
            policies["offload_policy"] = CPUOffloadPolicy()
        for part in (model.words, *model.blocks, model.output) if grouped else ():
            fully_shard(part, **policies)
        return fully_shard(model, **policies)

    return shard


@pytest.mark.parametrize(
    ("shard", "block", "said"),
    [
        (on_two(torch.float16), "Full", "[passed]"),
        (on_two(torch.float16), "Block", "[passed]"),  # RMS norm as one kernel keeps no float32 copies
        (on_two(torch.float16, offload=False), "Full", "out of memory"),
        (
            on_two(torch.float16, grouped=False),
            "Full",
            "[not yet]",
        ),  # no room; PyTorch 2.11, which does: not as fast as possible
        (on_two(torch.bfloat16), "Full", "s are possible"),
        (none_at_all, "Full", "is not sharded: each of the two GPUs"),
        (half, "Full", "look at words.weight"),
    ],
)
def test_a_model_on_two_t4s_is_graded(capsys, shard, block, said):
    from notebooks.scripts import llama

    checks.fits_two_t4s(shard, getattr(llama, block), llama.Llama, THREE)
    assert said in capsys.readouterr().out
