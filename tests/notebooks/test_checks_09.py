"""The graders of notebook 09: a plan for tensor parallel, words that hide a gather, and groups of parameters."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from tests.processes import HURRY

SIZES = {"dim": 256, "words": 20000, "length": 16}
BUDGET = 0.1  # GiB, between one group for both of the large layers and a group for each


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


def busy(like, words):
    """As a GPU whose computing takes so long, beside a gather of fixed length."""
    return words / (words + {"T4": 200, "A100": 2000, "H100-PCIe": 900}[like])


def scan(busy, wanted, powers):
    return next((words for words in (2**power for power in powers) if busy(words) >= wanted), None)


def right(busy, wanted):
    return scan(busy, wanted, range(6, 14))


def asks_for_all(busy, wanted):
    return min((words for words in (2**power for power in range(6, 14)) if busy(words) >= wanted), default=None)


def by_halving(busy, wanted):
    low, high = 6, 14
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if busy(2**middle) >= wanted else (middle + 1, high)
    return 2**low if low < 14 else None


def endless(busy, wanted):
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (right, "[passed]"),
        (lambda busy, wanted: 8192, "and 1,024 words are enough"),
        (lambda busy, wanted: 64, "with 64 words it is for 24%"),
        (lambda busy, wanted: 300, "no power of two"),
        (
            lambda busy, wanted: right(busy, min(wanted, 0.5)),
            "a T4 that is to be busy for 80% of a step: with 256 words it is for 56%",
        ),
        (lambda busy, wanted: 1 / 0, "your code raised ZeroDivisionError"),
        (
            lambda busy, wanted: scan(busy, wanted, range(6, 13)),
            "100% of a step: it says None, and 8,192 words are enough",
        ),
        (lambda busy, wanted: scan(busy, wanted, range(7, 14)), "75% of a step: it says 128, and 64 words are enough"),
        (lambda busy, wanted: right(busy, wanted + 1e-9), "it says None, and 8,192 words are enough"),
        (lambda busy, wanted: right(busy, wanted) or 8192, "with 8,192 words it is for"),
        (asks_for_all, "is right, and it asked 8 times. Each is a dry run"),
        (by_halving, "[passed]"),
        (lambda busy, wanted: np.int64(words) if (words := right(busy, wanted)) else None, "[passed]"),
        (endless, f"after {HURRY} seconds"),
    ],
)
def test_the_fewest_words_are_graded(capsys, answer, said):
    checks.fewest_words(answer, busy, timeout=HURRY if answer is endless else 120)
    assert said in capsys.readouterr().out


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
