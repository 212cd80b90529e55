"""The graders of notebook 06, out of memory: the riddle's curves, and training within a budget."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
import virtualgpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    (device,) = virtualgpu.gpus(1, memory="256 MB")
    yield device
    virtualgpu.reset()


RIGHT = {"A": "graph kept", "B": "optimizer state", "C": "longer inputs", "D": "outputs kept"}


def test_the_riddles_curves_are_what_their_names_say(gpu):
    curves = checks.riddle(gpu)
    assert torch.cuda.memory_allocated() == 0
    steps = {name: [b - a for a, b in itertools.pairwise(curve)] for name, curve in curves.items()}
    assert min(steps["A"][1:]) == max(steps["A"][1:]) > 2  # whole graphs
    assert sorted(steps["B"])[-1] > 5 and max(sorted(steps["B"])[:-1]) < 0.01  # one jump
    assert min(steps["C"]) < -5
    assert min(steps["D"][1:]) == max(steps["D"][1:]) == 2048 * 64 * 4 / MIB  # outputs and nothing else


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RIGHT, "[passed]"),
        ({}, "A is not None"),
        (RIGHT | {"B": "graph kept"}, "B is not 'graph kept'. It starts at 18.0 MiB, grows in 1 of 11 iterations"),
        (RIGHT | {"C": "outputs kept"}, "and falls"),
        (RIGHT | {"D": "graph kept"}, "by 0.5 MiB at most, and never falls"),
    ],
)
def test_naming_the_causes_is_graded(gpu, capsys, answer, said):
    checks.causes(answer, checks.riddle(gpu))
    assert said in capsys.readouterr().out


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).to("cuda:0")


def whole(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.item()


def in_pieces(net, x, y, scale=1, result=True):
    total = 0
    for xs, ys in zip(x.chunk(8), y.chunk(8), strict=True):
        loss = F.cross_entropy(net(xs), ys) / 8
        (scale * loss).backward()
        total += loss.detach()
    return total if result else None


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (in_pieces, "[passed]"),
        (whole, "right gradients, and a peak of"),
        (lambda *a: in_pieces(*a, scale=8), "8.00 times as long"),
        (lambda *a: in_pieces(*a, result=False), "the loss should be 2.3"),
        (lambda net, x, y: 2.3, "some parameters have no gradient"),
        (lambda net, x, y: torch.zeros(1 << 30, device="cuda"), "your code raised OutOfMemoryError"),
    ],
)
def test_training_within_a_budget_is_graded(capsys, step, said):
    x, y = torch.randn(2048, 64), torch.arange(2048) % 10
    checks.within_budget(step, make_net, x, y, budget=4 * MIB)
    out = capsys.readouterr().out
    assert said in out, out
