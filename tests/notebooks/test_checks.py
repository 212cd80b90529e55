"""The graders of notebook 01, and what all share: each names what is missing, one thing at a time, and never raises. (Stub and solution
run under nbval.)"""

import copy
import io
import os
import re
import shutil
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checks
from checks.grader import alone, grader, launched
from helpers import checkpoint
from tests.processes import HURRY


def said(capsys):
    return capsys.readouterr().out.strip()


def no_end(*args):
    while True:
        time.sleep(0.01)


def pack(model, optimizer, averaged):
    rng = torch.get_rng_state()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "averaged": averaged, "rng": rng}


def objects(model, optimizer, averaged):
    """What load() would refuse, and with it what a lesson of this notebook is about."""
    return pack(model, optimizer, averaged) | {"model": model}


def with_a_function(model, optimizer, averaged):
    return pack(model, optimizer, averaged) | {"load": lambda: 1}


def unpack_objects(saved, model, optimizer, averaged):
    unpack_without(None)(saved | {"model": saved["model"].state_dict()}, model, optimizer, averaged)


KEPT = {}


def pack_aside(*parts):
    """A cheat: it stays in the process."""
    KEPT.update(copy.deepcopy(pack(*parts)))
    return {}


def momentum_alone(saved, model, optimizer, averaged):
    """And not the learning rate, which a schedule has changed."""
    groups = optimizer.state_dict()["param_groups"]
    unpack_without(None)(saved | {"optimizer": {"state": saved["optimizer"]["state"], "param_groups": groups}},
                         model, optimizer, averaged)  # fmt: skip


@pytest.mark.parametrize("pack, unpack, complaint", [
    (objects, unpack_objects, "has to go through torch.load, which refuses it for torch.nn.modules.container.Sequential"),
    (with_a_function, lambda *args: unpack_without(None)(*args), "your code raised"),
    (pack_aside, lambda saved, *parts: unpack_without(None)(KEPT, *parts), "your code raised KeyError: 'model'"),
    (pack, momentum_alone, "the optimizer is not"),
    (lambda *parts: tuple(pack(*parts).values()),
     lambda saved, *parts: unpack_without(None)(dict(zip(pack(*parts), saved, strict=True)), *parts), "[passed]"),
])  # fmt: skip
def test_what_was_packed_goes_through_a_file_to_another_process(capsys, pack, unpack, complaint):
    checks.resumes(pack, unpack)
    assert complaint in said(capsys)


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


class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def trained():
    torch.manual_seed(7)
    return Net()


def frozen_by(freeze):
    """What a reader's function gives that freezes a trained model by `freeze`."""

    def make():
        model = trained()
        freeze(model)
        return model

    return make


class HalfFrozen(Net):
    def train(self, mode=True):
        super().train(mode)
        self.backbone[:3].eval()
        return self


class AlwaysTraining(Net):
    """The mode is not handed on: eval() leaves the rest as it was."""

    def train(self, mode=True):
        super().train()
        self.backbone[:3].eval()
        return self


def half_frozen(kind=HalfFrozen, until=3):
    torch.manual_seed(7)
    model = kind()
    model.backbone[:until].requires_grad_(False)
    return model


class PutToSleep(Net):
    """Another way, which is as good: in forward."""

    def forward(self, x):
        self.backbone[:3].eval()
        return super().forward(x)


def gradients_of_zero(kind):
    """Not frozen: a weight decay moves them."""
    model = half_frozen(kind)
    for parameter in model.backbone[:3].requires_grad_(True).parameters():
        parameter.register_hook(torch.zeros_like)
    return model


def never_trains(model):
    """Everything sleeps: nothing of the frozen part moves, and nothing of the rest's averages."""
    model.eval().backbone[:3].requires_grad_(False)
    model.train = lambda mode=True: model


@pytest.mark.parametrize("make, complaint", [
    (trained, "frozen parameters moved, backbone.1.weight first"),
    (frozen_by(lambda m: m.backbone[:3].requires_grad_(False)), "3 BatchNorm buffers did, backbone.2.running_mean first"),
    # once eval(): the first model.train() of a training undoes it
    (frozen_by(lambda m: m.train().backbone[:3].requires_grad_(False).eval()), "after model.train()?"),
    (frozen_by(never_trains), "too much is frozen: backbone.4.running_mean"),
    (lambda: half_frozen(until=4), "too much is frozen: backbone.3.weight"),
    (lambda: half_frozen(kind=Net), "3 BatchNorm buffers did"),
    (frozen_by(lambda m: m.requires_grad_(False)), "no parameter is left to train"),
    (frozen_by(lambda m: nn.init.zeros_(m.backbone[1].weight)), "1 tensors of backbone[:3] are not the trained ones"),
    (lambda: None, "returns None; a model is wanted"),
    (lambda: half_frozen(kind=AlwaysTraining), "after model.eval(), which is model.train(False), the model is still"),
    (lambda: gradients_of_zero(HalfFrozen), "frozen parameters moved, backbone.1.weight first"),
    (half_frozen, "[passed]"),
    (lambda: half_frozen(kind=PutToSleep), "[passed]"),
])  # fmt: skip
def test_frozen(capsys, make, complaint):
    checks.frozen(make, trained, part="backbone[:3]")
    assert complaint in said(capsys)


def in_place(state, path):
    torch.save(state, path)


def by_its_bytes(state, path):
    content = io.BytesIO()
    torch.save(state, content)
    path.write_bytes(content.getvalue())


def beside(state, path):
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        torch.save(state, file)
    os.replace(part, path)


def beside_by_tempfile(state, path):
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        torch.save(state, file)
    os.rename(file.name, path)


def removed_first(state, path):
    torch.save(state, path.with_suffix(".part"))
    path.unlink()
    os.rename(path.with_suffix(".part"), path)


def copied_over(state, path):
    torch.save(state, path.with_suffix(".part"))
    shutil.copyfile(path.with_suffix(".part"), path)
    path.with_suffix(".part").unlink()


def kept_aside(state, path):
    os.replace(path, path.with_suffix(".old"))
    torch.save(state, path)


def with_a_way_back(state, path):
    """A kill asks no except."""
    earlier = path.read_bytes()
    try:
        torch.save(state, path)
    except BaseException:
        path.write_bytes(earlier)


def in_another_folder(state, path):
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.save(state, file)
    try:
        os.replace(file.name, path)
    finally:
        os.unlink(file.name)


@pytest.mark.parametrize("save, complaint", [
    (in_place, "killed right after a.pt was opened for writing, the earlier checkpoint is gone"),
    (by_its_bytes, "killed right after a.pt was opened for writing, the earlier checkpoint is gone"),
    (with_a_way_back, "killed right after a.pt was opened for writing, the earlier checkpoint is gone"),
    (copied_over, "killed right after a.pt was opened for writing, the earlier checkpoint is gone"),
    (removed_first, "killed before a rename, there is no file of that name any more"),
    (kept_aside, "killed right after a.pt was opened for writing, the earlier checkpoint is gone"),
    (in_another_folder, "your second file lies in another folder"),
    (lambda state, path: torch.save(state, path.with_suffix(".part")), "the file still holds the earlier state"),
    (lambda state, path: (beside(state, path), torch.save(state, path.with_suffix(".bak"))), "a.bak is left behind"),
    (lambda state, path: 1 / 0, "your code raised ZeroDivisionError"),
    (beside, "[passed]"),
    (beside_by_tempfile, "[passed]"),
    (checkpoint.save, "[passed]"),
])  # fmt: skip
def test_survives(capsys, save, complaint):
    """Writing in place, and each half measure, dies at one of its moments."""
    checks.survives(save)
    assert complaint in said(capsys)


@pytest.mark.parametrize("grade", [
    lambda: checks.resumes(pack, no_end, timeout=HURRY),
    lambda: checks.survives(no_end, timeout=HURRY),
    lambda: checks.frozen(no_end, trained, part="backbone[:3]", timeout=HURRY),
])  # fmt: skip
def test_code_without_an_end_is_ended(capsys, grade):
    grade()
    assert (
        said(capsys)
        == f"[not yet] after {HURRY} seconds your code has not come to an end: is there a loop without one?"
    )


def test_alone_says_what_the_worker_says():
    assert alone(lambda x: x, "this is missing") == "this is missing"
    assert alone(lambda: None) is None
    assert alone(lambda: [].pop()) == "your code raised IndexError: pop from empty list"
    assert alone(lambda: os._exit(0)) == "your code's process exited with status 0 before it was done"
    assert launched(lambda: os._exit(3), nprocs=1) == "rank 0 exited with status 3 before it was done"


@pytest.mark.parametrize("error, complaint", [
    (SystemExit("enough"), "your code raised SystemExit: enough"),
    (ValueError(5_000_000 * "x"), "x" * 1900 + r".* \.\.\. \(4,998,\d+ characters more\)"),
])  # fmt: skip
def test_a_grader_never_raises_and_keeps_to_a_page(capsys, error, complaint):
    @grader
    def check():
        raise error

    check()
    assert re.search(complaint, said(capsys))


def test_launched_says_where_each_rank_stands():
    def worker():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(2), src=1)

    assert launched(worker, timeout=HURRY) == (
        f"after {HURRY} seconds rank 0 waits in recv and rank 1 is done, and waits for the others: "
        "do all ranks call the same collectives?"
    )
