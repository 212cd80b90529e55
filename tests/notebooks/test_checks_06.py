"""The graders of notebook 06, out of memory: a rule for the riddle's curves, and training within a budget."""

import gc
import itertools
import random
import re
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import checks
import virtualgpu
from checks import notebook_06
from checks.grader import NoRoom

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


def on_the_cpu_by_hand(net, x, y):
    """Without calling the net, whose inputs would tell."""
    parts = {name: p.cpu() for name, p in net.named_parameters()}
    hidden = torch.relu(F.linear(x.cpu(), parts["0.weight"], parts["0.bias"]))
    loss = F.cross_entropy(F.linear(hidden, parts["2.weight"], parts["2.bias"]), y.cpu())
    loss.backward()
    return loss.item()


def by_keyword(net, x, y):
    return in_pieces(lambda xs: net(input=xs), x, y)


def with_checkpoints(net, x, y):
    total = 0
    for xs, ys in zip(x.split(128), y.split(128), strict=True):
        out = checkpoint(net, xs, use_reentrant=False)
        loss = F.cross_entropy(out, ys, reduction="sum") / len(x)
        loss.backward()
        total = total + loss.detach().cpu()
    return total


def statistics_replaced(net, x, y):
    loss = whole(net, x, y)
    torch.cuda.max_memory_allocated = lambda device=None: 0
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
        (on_the_cpu_by_hand, "right gradients, computed on cpu: the task is to stay on cuda:0"),
        (statistics_reset, "the peak was reset within the step"),
        (statistics_replaced, "right gradients, and a peak of"),
        (by_keyword, "[passed]"),
        (with_checkpoints, "[passed]"),
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


@pytest.mark.parametrize(
    "grade",
    [
        lambda gpu: checks.causes(right, gpu),
        lambda gpu: checks.within_budget(in_pieces, make_net, torch.randn(2048, 64), torch.arange(2048) % 10, 4 * MIB),
    ],
)
def test_a_full_gpu_is_not_the_readers_fault(gpu, capsys, grade):
    """As when the cells ran in another order, and an error still keeps what it held."""
    held = [torch.zeros(1 << 20, dtype=torch.uint8, device=gpu) for _ in range(246)]
    grade(gpu)
    out = capsys.readouterr().out
    assert "MiB are taken before your code begins" in out and "section 11" in out and "your code raised" not in out, out
    del held
    grade(gpu)
    assert "[passed]" in capsys.readouterr().out


def test_the_riddle_says_who_holds_the_gpu(gpu):
    held = torch.zeros(246 << 20, dtype=torch.uint8, device=gpu)
    with pytest.raises(NoRoom, match=r"helpers.forget_error\(\)"):
        checks.riddle(gpu)
    del held


class Circle:
    """Nobody's any more, but gone only when Python looks."""

    def __init__(self, held):
        self.held, self.itself = held, self


def test_what_an_earlier_cell_left_does_not_go_in_the_middle_of_a_curve(gpu, monkeypatch):
    Circle(torch.zeros(32 * MIB, dtype=torch.uint8, device=gpu))
    garbage = iter([None])

    def run(device, draw):
        for _ in range(3):
            for _ in garbage:
                gc.collect()
            yield 0.0

    monkeypatch.setattr(notebook_06, "SITUATIONS", {"nothing": run})
    assert notebook_06._runs(gpu, random.Random(0), 1) == [("nothing", [0.0, 0.0, 0.0], 0.0)]
