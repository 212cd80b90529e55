"""The graders of notebook 01, and what all share: each names what is missing, one thing at a time, in a line, and never raises. For each
grader a table of answers, wrong ones and right ones by another way than the solution's. (Stub and solution run under nbval.)"""

import copy
import io
import os
import shutil
import tempfile
import unittest
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import checks
from checks.grader import alone, grader, launched
from notebooks.scripts import train_ddp
from tests.processes import HURRY, no_end


def numpy_state():
    state = np.random.get_state(legacy=False)
    return state | {"state": {"key": state["state"]["key"].tolist(), "pos": state["state"]["pos"]}}


def pack(model, optimizer, averaged):
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "averaged": averaged}
    return parts | {"rng": torch.get_rng_state(), "numpy": numpy_state()}


def as_numpy_gives_it(*parts):
    """What many pages advise, and what does not load."""
    return pack(*parts) | {"numpy": np.random.get_state()}


def a_mean_score(*parts):
    return pack(*parts) | {"best": np.mean([0.5, 0.75])}


def as_a_tensor(*parts):
    """Another right one: the legacy tuple, with the key as a tensor."""
    kind, key, *rest = np.random.get_state()
    return pack(*parts) | {"numpy": (kind, torch.from_numpy(key.astype(np.int64)), *rest)}


def from_a_tensor(saved, *parts):
    kind, key, *rest = saved["numpy"]
    unpack_without(None)(saved | {"numpy": (kind, key.numpy().astype(np.uint32), *rest)}, *parts)


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
        if forgotten != "numpy":
            np.random.set_state(saved["numpy"])

    return unpack


def rng_as_a_list(*parts):
    packed = pack(*parts)
    return packed | {"rng": packed["rng"].tolist()}


def the_same_seed(*parts):
    torch.manual_seed(7)
    return pack(*parts)


ENDLESS = "after 60 seconds your code has not come to an end: is there a loop without one?"


@pytest.mark.parametrize("pack, unpack, said", [
    (pack, unpack_without("model"), "the model is not"),
    (pack, unpack_without("optimizer"), "the optimizer is not"),
    (pack, unpack_without("averaged"), "the average is not"),
    (pack, unpack_without("rng"), "next random number"),
    (pack, unpack_without("numpy"), "NumPy's next random number would be another one"),
    (as_numpy_gives_it, unpack_without(None), "torch.load does not open your file (UnpicklingError ... goes in as a list (.tolist())"),
    (a_mean_score, unpack_without(None), "torch.load does not open your file (UnpicklingError ... a number of NumPy's by .item()"),
    (pack, momentum_alone, "the optimizer is not"),
    (objects, unpack_objects, "has to go through torch.load, which refuses it for torch.nn.modules.container.Sequential"),
    (with_a_function, lambda *args: unpack_without(None)(*args), "your code raised"),
    (pack_aside, lambda saved, *parts: unpack_without(None)(KEPT, *parts), "your code raised KeyError: 'model'"),
    (pack, no_end, ENDLESS),
    (pack, unpack_without(None), "[passed]"),
    (lambda *parts: tuple(pack(*parts).values()),
     lambda saved, *parts: unpack_without(None)(dict(zip(pack(*parts), saved, strict=True)), *parts), "[passed]"),
    (rng_as_a_list, lambda saved, *parts: unpack_without(None)(saved | {"rng": torch.tensor(saved["rng"], dtype=torch.uint8)}, *parts),
     "[passed]"),
    (as_a_tensor, from_a_tensor, "[passed]"),
    (the_same_seed, lambda *args: (unpack_without("rng")(*args), torch.manual_seed(7)), "[passed]"),
])  # fmt: skip
def test_resumes(says, pack, unpack, said):
    says(said, checks.resumes, pack, unpack)


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


class Nothing(Net):
    """`model.eval()(x)` finds None."""

    def train(self, mode=True):
        super().train(mode)
        self.backbone[:3].eval()


def by_a_hook(model):
    model.backbone[:3].requires_grad_(False)
    model.register_forward_pre_hook(lambda model, inputs: model.backbone[:3].eval() and None)


def layer_by_layer(model):
    for layer in model.backbone[:3]:
        layer.requires_grad_(False).eval().train = lambda mode=True, layer=layer: layer


@pytest.mark.parametrize("make, said", [
    (trained, "frozen parameters moved, backbone.1.weight first"),
    (frozen_by(lambda m: m.backbone[:3].requires_grad_(False)), "3 BatchNorm buffers did, backbone.2.running_mean first"),
    # once eval(): the first model.train() of a training undoes it
    (frozen_by(lambda m: m.train().backbone[:3].requires_grad_(False).eval()), "after model.train()?"),
    (frozen_by(never_trains), "too much is frozen: backbone.4.running_mean"),
    (lambda: half_frozen(until=4), "too much is frozen: backbone.3.weight"),
    (frozen_by(lambda m: m.requires_grad_(False)), "no parameter is left to train"),
    (frozen_by(lambda m: nn.init.zeros_(m.backbone[1].weight)), "1 tensors of backbone[:3] are not the trained ones"),
    (lambda: None, "returns None; a model is wanted"),
    (lambda: half_frozen(kind=AlwaysTraining), "after model.eval(), which is model.train(False), the model is still"),
    (lambda: half_frozen(kind=Nothing), "model.train() returns None, and not the model"),
    (lambda: gradients_of_zero(HalfFrozen), "frozen parameters moved, backbone.1.weight first"),
    (no_end, ENDLESS),
    (half_frozen, "[passed]"),
    (lambda: half_frozen(kind=PutToSleep), "[passed]"),
    (frozen_by(by_a_hook), "[passed]"),
    (frozen_by(layer_by_layer), "[passed]"),
])  # fmt: skip
def test_frozen(says, make, said):
    says(said, checks.frozen, make, trained, part="backbone[:3]")


def test_frozen_takes_pictures_of_any_shape(says):
    def colored():
        torch.manual_seed(7)
        net = nn.Sequential()
        net.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        net.head = nn.Linear(4 * 36, 10)
        return net

    def frozen_colored():
        net = colored()
        net.backbone[:2].requires_grad_(False)
        net.backbone.register_forward_pre_hook(lambda layers, inputs: layers[:2].eval() and None)
        return net

    says("[passed]", checks.frozen, frozen_colored, colored, part="backbone[:2]", shape=(3, 8, 8))


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


def in_a_folder_beside(state, path):
    """On the same disk: what lies below the checkpoint's folder can be renamed into it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.save(state, Path(folder, "new"))
        os.replace(Path(folder, "new"), path)


def in_a_sibling_folder(state, path):
    """Not below the checkpoint's own folder, and on its disk all the same."""
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as folder:
        torch.save(state, Path(folder, "new"))
        os.replace(Path(folder, "new"), path)


def in_a_folder_copied_over(state, path):
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.save(state, Path(folder, "new"))
        shutil.copyfile(Path(folder, "new"), path)


def in_a_folder_that_stays(state, path):
    (path.parent / "new").mkdir()
    torch.save(state, path.parent / "new" / "a.pt")
    os.replace(path.parent / "new" / "a.pt", path)


OPENED = "killed right after a.pt was opened for writing, the earlier checkpoint is gone"


@pytest.mark.parametrize("save, said", [
    (in_place, OPENED),
    (by_its_bytes, OPENED),
    (with_a_way_back, OPENED),
    (copied_over, OPENED),
    (in_a_folder_copied_over, OPENED),
    (kept_aside, OPENED),
    (removed_first, "killed before a rename, there is no file of that name any more"),
    (in_another_folder, "your second file lies in another folder"),
    (lambda state, path: torch.save(state, path.with_suffix(".part")), "the file still holds the earlier state"),
    (lambda state, path: (beside(state, path), torch.save(state, path.with_suffix(".bak"))), "a.bak is left behind"),
    (in_a_folder_that_stays, "new is left behind"),
    (lambda state, path: 1 / 0, "your code raised ZeroDivisionError"),
    (no_end, ENDLESS),
    (beside, "[passed]"),
    (beside_by_tempfile, "[passed]"),
    (in_a_folder_beside, "[passed]"),
    (in_a_sibling_folder, "[passed]"),
    (train_ddp.save, "[passed]"),
])  # fmt: skip
def test_survives(says, save, said):
    """Writing in place, and each half measure, dies at one of its moments."""
    says(said, checks.survives, save)


def test_alone_says_what_the_worker_says():
    assert alone(lambda x: x, "this is missing") == "this is missing"
    assert alone(lambda: None) is None
    assert alone(lambda: [].pop()) == "your code raised IndexError: pop from empty list"
    assert alone(lambda: os._exit(0)) == "your code's process exited with status 0 before it was done"
    assert launched(lambda: os._exit(3), nprocs=1) == "rank 0 exited with status 3 before it was done"


@pytest.mark.parametrize("error, said", [
    (ZeroDivisionError("no"), "your code raised ZeroDivisionError: no"),
    (SystemExit("enough"), "your code raised SystemExit: enough"),
    (ValueError(5_000_000 * "x"), " ... (4,998,0"),
])  # fmt: skip
def test_a_grader_never_raises_keeps_to_a_page_and_draws_no_number(says, error, said):
    before = torch.get_rng_state()
    assert len(says(said, grader(raises(error)))) < 2100
    assert torch.equal(before, torch.get_rng_state())


def raises(error):
    def check():
        torch.rand(1)
        raise error

    return check


@pytest.mark.parametrize("check, error", [
    (lambda: None, None),
    (lambda: "look here", "^look here$"),
    (raises(KeyError("of the reader")), "^your code raised KeyError: 'of the reader'$"),
])  # fmt: skip
def test_a_strict_grader_raises_what_it_would_print(capsys, monkeypatch, check, error):
    monkeypatch.setenv("CHECKS", "strict")
    if error is None:
        assert grader(check)() is True
    else:
        with pytest.raises(checks.NotYet, match=error):
            grader(check)()
    assert capsys.readouterr().out == ("" if error else "[passed] well done\n")


def test_what_cannot_run_here_is_skipped(capsys, monkeypatch):
    """Neither passed nor failed: also for who grades a class by pytest or unittest."""
    monkeypatch.delattr(os, "fork")
    why = "this grader kills copies of a process, which needs Linux or macOS: on Windows, use WSL or Colab"
    assert checks.survives(beside) is None
    assert capsys.readouterr().out == f"[skipped] {why}\n"
    monkeypatch.setenv("CHECKS", "strict")
    with pytest.raises(checks.Skipped) as raised:
        checks.survives(beside)
    assert str(raised.value) == why and isinstance(raised.value, (checks.NotYet, unittest.SkipTest))


def test_launched_says_where_each_rank_stands():
    def worker():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(2), src=1)

    assert launched(worker, timeout=HURRY) == (
        f"after {HURRY} seconds rank 0 waits in recv and rank 1 is done, and waits for the others: "
        "do all ranks call the same collectives?"
    )
