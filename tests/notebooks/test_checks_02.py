"""The graders of notebook 02: where to cut a model, and a skip over the cut."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from virtualgpu import session
from virtualgpu.hardware.specs import find_all

pytestmark = pytest.mark.usefixtures("no_gpus_before")


PEAKS = {1: (100.0, 900.0), 2: (400.0, 500.0), 3: (450.0, 480.0), 4: (800.0, 60.0)}
TIMES = {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}


@pytest.mark.parametrize(
    "choose, complaint",
    [
        (lambda peaks: 4, "at cut 4 the fuller GPU holds 800 MiB; another cut needs 480"),
        (lambda peaks: 3, "right for these peaks, but not for those of another model"),
        (lambda peaks: 7, "it returned 7, which is not one of the cuts 1 to 4"),
        (lambda peaks: None, "it returned None"),
        (lambda peaks: peaks["x"], "raised KeyError"),
        (lambda peaks: [3], "it returned [3], which is not one of"),
        (
            lambda peaks: min(peaks, key=lambda cut: abs(peaks[cut][0] - peaks[cut][1])),
            "not for those of another model",
        ),
        (lambda peaks: min(peaks, key=lambda cut: max(peaks[cut])), "[passed]"),
        (lambda peaks: torch.tensor([*peaks])[torch.tensor([*peaks.values()]).amax(1).argmin()], "[passed]"),
        (lambda peaks: np.array([*peaks])[np.array([*peaks.values()]).max(1).argmin()], "[passed]"),
    ],
)
def test_most_even(capsys, choose, complaint):
    checks.most_even(choose, PEAKS)
    assert complaint in capsys.readouterr().out


def fastest(peaks, times, budget):
    return min((cut for cut in peaks if max(peaks[cut]) <= budget), key=times.get, default=None)


@pytest.mark.parametrize(
    "choose, complaint",
    [
        (
            lambda peaks, times, budget: min(times, key=times.get),
            "cut 4 needs 800 MiB on one GPU, and the budget is 500",
        ),
        (lambda peaks, times, budget: 2, "cut 2 fits, with 300.0 ms a step; another that fits takes 200.0 ms"),
        (lambda peaks, times, budget: None, "it found no cut for 500 MiB, but 2 fit, cut 2 among them"),
        (
            lambda peaks, times, budget: fastest(peaks, times, budget or 500),
            "nothing fits in 0 MiB, and it should return None, not 3",
        ),
        (lambda peaks, times, budget: min(c for c in peaks), "cut 1 needs 900 MiB"),
        (
            lambda peaks, times, budget: fastest(peaks, times, budget - (budget == 480)),
            "it found no cut for 480 MiB, but 1 fit, cut 3 among them, which needs just that",
        ),
        # the notebook's own times fall from cut to cut, and its even cut fits
        (
            lambda peaks, times, budget: max((c for c in peaks if max(peaks[c]) <= budget), default=None),
            "another that fits takes",
        ),
        (
            lambda peaks, times, budget: fastest(peaks, {c: max(peaks[c]) for c in peaks}, budget),
            "another that fits takes",
        ),
        (fastest, "[passed]"),
        (lambda peaks, times, budget: empty_after(fastest(peaks, times, budget), peaks, times), "[passed]"),
    ],
)
def test_fastest_that_fits(capsys, choose, complaint):
    checks.fastest_that_fits(choose, PEAKS, TIMES, budget=500)
    assert complaint in capsys.readouterr().out


def empty_after(cut, *tables):
    """An answer that uses up what it was handed."""
    for table in tables:
        table.clear()
    return cut


def skip_net(forward, above="cuda:1"):
    class SkipNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.below = nn.Linear(16, 16).to("cuda:0")
            self.above = nn.Linear(16, 16).to(above)

    SkipNet.forward = forward
    return SkipNet


def hidden(self, x):
    return self.above(torch.relu(self.below(x)).to(self.above.weight.device))


def fixed_above(self, x):
    weight, bias = self.above.weight.detach(), self.above.bias.detach()
    return F.linear(torch.relu(self.below(x)).to("cuda:1"), weight, bias) + x.to("cuda:1")


def elsewhere(place, back="cuda:1"):
    """The right numbers and gradients, from weights that travel."""

    def forward(self, x):
        moved = [
            layer_part.to(place) for layer in (self.below, self.above) for layer_part in (layer.weight, layer.bias)
        ]
        x = x.to(place)
        return (F.linear(torch.relu(F.linear(x, *moved[:2])), *moved[2:]) + x).to(back)

    return skip_net(forward)


def moves_above(self, x):
    return self.above.to(x.device)(torch.relu(self.below(x))) + x


@pytest.mark.parametrize(
    "make, complaint",
    [
        (skip_net(lambda self, x: hidden(self, x) + x), "at least two devices, cuda:1 and cuda:0!"),
        (skip_net(lambda self, x: hidden(self, x) + x, above="cuda:0"), "the layers should stay on cuda:0 and cuda:1"),
        (skip_net(lambda self, x: hidden(self, x)), "the numbers are not those"),
        (
            skip_net(lambda self, x: (hidden(self, x.detach()) + x.detach().to("cuda:1")).requires_grad_()),
            "no gradient arrives",
        ),
        (
            skip_net(lambda self, x: hidden(self, x) + x.detach().to("cuda:1")),
            "another gradient arrives than without GPUs at x",
        ),
        (skip_net(fixed_above), "no gradient arrives at above.weight"),
        (skip_net(torch.no_grad()(lambda self, x: hidden(self, x) + x.to("cuda:1"))), "or under no_grad?"),
        (skip_net(lambda self, x: hidden(self, x).cpu() + x.cpu()), "are right, but cpu computes"),
        (elsewhere("cpu"), "are right, but cpu computes"),
        (elsewhere("cuda:0"), "but cuda:1 computes nothing"),
        (skip_net(moves_above), "the layers should stay on cuda:0 and cuda:1; they are on cuda:0 and cuda:0"),
        (skip_net(lambda self, x: hidden(self, x) + x.to("cuda:1")), "[passed]"),
        (skip_net(lambda self, x: hidden(self, x.clone()).add(x.to("cuda:1", non_blocking=True))), "[passed]"),
        (skip_net(lambda self, x: hidden(self, x).to("cuda:0") + x), "[passed]"),
    ],
)
def test_skip_repaired(capsys, make, complaint):
    checks.skip_repaired(make)
    assert complaint in capsys.readouterr().out


def for_ever(*what):
    while True:
        pass


@pytest.mark.parametrize(
    "grade",
    [
        lambda: checks.most_even(for_ever, PEAKS),
        lambda: checks.fastest_that_fits(for_ever, PEAKS, TIMES, budget=500),
        lambda: checks.skip_repaired(skip_net(for_ever)),
    ],
)
def test_an_endless_loop_is_told(capsys, hurried, grade):
    grade()
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after ") and "in for_ever" in out and "end?" in out, out


def test_gpus_that_play_real_ones_are_there_after_grading(capsys, monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    session.activate(find_all(2, "T4", None))
    x = torch.ones(3, device="cuda:1")
    checks.skip_repaired(skip_net(lambda self, x: hidden(self, x) + x.to("cuda:1")))
    assert "[passed]" in capsys.readouterr().out
    assert torch.cuda.device_count() == 2 and (x + 1).device == torch.device("cuda:1")
