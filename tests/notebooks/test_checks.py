"""The graders: each names what is missing, one thing at a time, and never raises. (Stub and solution run under nbval.)"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checks
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


def test_launched_says_where_each_rank_stands():
    def worker():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(2), src=1)

    assert launched(worker, timeout=3) == (
        "after 3 seconds rank 0 waits in recv and rank 1 is done, and waits for the others: "
        "do both ranks call the same collectives?"
    )
