"""The graders: each names what is missing, one thing at a time, and never raises. (Stub and solution run under nbval.)"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checks
import virtualgpu
from checks.grader import launched


def said(capsys):
    return capsys.readouterr().out.strip()


def pack(model, optimizer, averaged):
    rng = torch.get_rng_state()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "averaged": averaged, "rng": rng}


def unpack_without(forgotten):
    def unpack(saved, model, optimizer, averaged):
        if forgotten != "model":
            model.load_state_dict(saved["model"])
        if forgotten != "optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        if forgotten == "averaged":
            averaged = saved["averaged"]  # the beginner's version: it binds a local name, and restores nothing
        else:
            averaged.update(saved["averaged"])
        if forgotten != "rng":
            torch.set_rng_state(saved["rng"])

    return unpack


@pytest.mark.parametrize(
    "forgotten, complaint",
    [
        ("model", "the model is not"),
        ("optimizer", "the optimizer is not"),
        ("averaged", "the average is not"),
        ("rng", "next random number"),
        (None, "[passed]"),
    ],
)
def test_resumes_names_what_was_forgotten(capsys, forgotten, complaint):
    checks.resumes(pack, unpack_without(forgotten))
    assert complaint in said(capsys)


def test_the_readers_error_is_shown_and_the_random_state_is_kept(capsys):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    checks.resumes(lambda *args: 1 / 0, None)
    assert "your code raised ZeroDivisionError" in said(capsys)
    assert torch.equal(before, torch.get_rng_state())


def net(classes=10):
    model = nn.Module()
    model.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU())
    model.head = nn.Linear(8, classes)
    model.forward = lambda x: model.head(model.backbone(x))
    return model


def fitting(model, weights):
    weights = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    own = model.state_dict()
    fits = {name: tensor for name, tensor in weights.items() if tensor.shape == own[name].shape}
    model.load_state_dict(fits, strict=False)
    return sorted(weights.keys() - fits.keys())


@pytest.mark.parametrize("load, complaint", [
    (lambda model, weights: list(weights), "0 of the 9 tensors"),
    (lambda model, weights: (fitting(model, weights), [])[1], "return the names left out: ['head.bias', 'head.weight']"),
    (lambda model, weights: (fitting(model, weights), nn.init.zeros_(model.head.weight))[0], "the head was changed"),
    (fitting, "[passed]"),
])  # fmt: skip
def test_loads_what_fits(capsys, load, complaint):
    checks.loads_what_fits(load, net)
    assert complaint in said(capsys)


@pytest.mark.parametrize("freeze, complaint", [
    (lambda m: m.train(), "frozen parameters moved, backbone.1.weight first"),
    (lambda m: m.train().backbone[:3].requires_grad_(False), "3 BatchNorm buffers did, backbone.2.running_mean first"),
    (lambda m: m.train().backbone.requires_grad_(False).eval(), "too much is frozen: backbone.3.weight"),
    (lambda m: m.train().backbone[:3].requires_grad_(False).eval(), "[passed]"),
])  # fmt: skip
def test_frozen(capsys, freeze, complaint):
    model = net()
    freeze(model)
    checks.frozen(model, frozen="backbone[:3]")
    assert complaint in said(capsys)


# -- notebook 02


PEAKS = {1: (100.0, 900.0), 2: (400.0, 500.0), 3: (450.0, 480.0), 4: (800.0, 60.0)}
TIMES = {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}


@pytest.mark.parametrize(
    "choose, complaint",
    [
        (lambda peaks: 4, "at cut 4 the fuller GPU holds 800 MiB; another cut needs 480"),
        (lambda peaks: 3, "right for these peaks, but not for those of another model"),
        (lambda peaks: 7, "it returned 7, which is not one of the cuts 1 to 4"),
        (lambda peaks: None, "it returned None"),
        (lambda peaks: peaks["x"], "your code raised KeyError"),
        (lambda peaks: min(peaks, key=lambda cut: max(peaks[cut])), "[passed]"),
    ],
)
def test_most_even(capsys, choose, complaint):
    checks.most_even(choose, PEAKS)
    assert complaint in said(capsys)


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
        (fastest, "[passed]"),
    ],
)
def test_fastest_that_fits(capsys, choose, complaint):
    checks.fastest_that_fits(choose, PEAKS, TIMES, budget=500)
    assert complaint in said(capsys)


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
        (skip_net(lambda self, x: hidden(self, x) + x.to("cuda:1")), "[passed]"),
        (skip_net(lambda self, x: hidden(self, x).to("cuda:0") + x), "[passed]"),
    ],
)
def test_skip_repaired(capsys, make, complaint, monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    with virtualgpu.gpus(2):
        checks.skip_repaired(make)
    assert complaint in said(capsys)


def test_launched_says_where_each_rank_stands():
    def worker():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(2), src=1)

    assert launched(worker, timeout=3) == (
        "after 3 seconds rank 0 waits in recv and rank 1 is done, and waits for the others: "
        "do both ranks call the same collectives?"
    )
