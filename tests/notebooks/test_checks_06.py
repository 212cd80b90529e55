"""The graders of notebook 06, out of memory: a rule for the riddle's curves, and training within a budget."""

import itertools
import re
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
import virtualgpu
from checks import notebook_06

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    (device,) = virtualgpu.gpus(1, memory="256 MB")
    yield device
    virtualgpu.reset()


def steps_of(curve):
    return [after - before for before, after in itertools.pairwise(curve)]


def right(curve, output):
    steps = [after - before for before, after in itertools.pairwise(curve)]
    if min(steps) < -0.01:
        return "longer inputs"
    if sum(step > 0.01 for step in steps) == 1:
        return "optimizer state"
    return "outputs kept" if sum(steps) / len(steps) < 1.5 * output else "graph kept"


def by_size(curve, output):
    """What works for the four curves that the reader sees."""
    return right(curve, output) if max(curve) - min(curve) < 10 else "graph kept"


def test_the_riddles_curves_are_what_their_causes_say(gpu):
    runs = notebook_06._runs(gpu, notebook_06.random.Random(60), 4)
    assert torch.cuda.memory_allocated() == 0
    assert sorted(cause for cause, _, _ in runs) == sorted(4 * list(notebook_06.SITUATIONS))
    for cause, curve, output in runs:
        steps = steps_of(curve)
        assert len(curve) == 12
        if cause == "graph kept":
            assert min(steps[1:]) == pytest.approx(max(steps[1:]), abs=0.01) and min(steps) > 1.9 * output
        elif cause == "outputs kept":
            assert min(steps[1:]) == max(steps[1:]) == output
        elif cause == "optimizer state":
            assert max(steps) > 2 and sorted(steps)[-2] < 0.01 and min(steps) > -0.01
        else:
            assert min(steps) < -1


def test_the_riddle_shows_each_cause_once_and_the_same_each_time(gpu):
    curves, outputs = checks.riddle(gpu)
    assert (curves, outputs) == checks.riddle(gpu)
    assert sorted(right(curve, outputs[name]) for name, curve in curves.items()) == sorted(notebook_06.SITUATIONS)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (right, "[passed]"),
        (lambda curve, output: "graph kept", "it names 4 of 16 runs. One that it takes for 'graph kept': it starts at"),
        (by_size, "of 16 runs. One that it takes for 'graph kept'"),
        (lambda curve, output: "a leak", "it returns 'a leak'; the names are ['graph kept', 'longer inputs', "),
        (lambda curve, output: curve[12], "your code raised IndexError: list index out of range"),
        (lambda curve, output: None, "it returns None"),
    ],
)
def test_a_rule_for_the_curves_is_graded(gpu, capsys, cause, said):
    checks.causes(cause, gpu)
    out = capsys.readouterr().out
    assert said in out, out


def test_a_table_of_answers_by_trial_does_not_pass(gpu, capsys):
    """What is wrong is said of one run, and never what it is: a reader who tries names in turn learns one run a try."""
    curves, outputs = checks.riddle(gpu)
    table = {tuple(curve): right(curve, outputs[name]) for name, curve in curves.items()}
    checks.causes(lambda curve, output: table.get(tuple(curve), "graph kept"), gpu)
    named = int(re.search(r"it names (\d+) of 16", capsys.readouterr().out)[1])
    assert named <= 8  # those that look like one of the four by chance, and each "graph kept"


def endless(*args):
    while True:
        time.sleep(0.01)


def test_a_rule_that_does_not_end_is_ended(gpu, capsys, hurried):
    checks.causes(endless, gpu)
    assert "your code has not come to an end" in capsys.readouterr().out


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


def on_the_cpu(net, x, y):
    loss = whole(net.cpu(), x.cpu(), y.cpu())
    net.cuda()
    return loss


def statistics_reset(net, x, y):
    loss = whole(net, x, y)
    torch.cuda.reset_peak_memory_stats()
    return loss


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (in_pieces, "[passed]"),
        (whole, "right gradients, and a peak of"),
        (lambda *a: in_pieces(*a, scale=8), "8.00 times as long"),
        (lambda *a: in_pieces(*a, result=False), "the loss should be 2.3"),
        (lambda net, x, y: 2.3, "some parameters have no gradient"),
        (
            lambda net, x, y: torch.zeros(1 << 30, device="cuda"),
            "your code raised OutOfMemoryError: CUDA out of memory",
        ),
        (on_the_cpu, "right gradients, computed on cpu: the task is to stay on cuda:0"),
        (statistics_reset, "the peak was reset within the step"),
    ],
)
def test_training_within_a_budget_is_graded(capsys, step, said):
    x, y = torch.randn(2048, 64), torch.arange(2048) % 10
    checks.within_budget(step, make_net, x, y, budget=4 * MIB)
    out = capsys.readouterr().out
    assert said in out, out
    assert torch.cuda.memory_allocated() == 0


def test_a_step_that_does_not_end_is_ended(capsys, hurried):
    checks.within_budget(endless, make_net, torch.randn(64, 64), torch.arange(64) % 10, budget=4 * MIB)
    assert "your code has not come to an end" in capsys.readouterr().out
