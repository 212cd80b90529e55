"""The graders of notebook 01: a checkpoint that brings everything back, a save that survives a kill, a backbone that stays frozen."""

import os
import shutil
import tempfile

import torch
from torch import nn

import checks
from notebooks.scripts import train_ddp
from tests.notebooks.answers import PASSED, table

OPTIMIZER = 'optimizer.load_state_dict(saved["optimizer"])'

test_resumes = table(checks.resumes, "01", "pack unpack", [
    (('model.load_state_dict(saved["model"])\n', "pass\n"), "the model is not"),
    # the momentum alone, and not the learning rate, which a schedule has changed
    ((OPTIMIZER, 'optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer"]["state"]})'), "the optimizer is not"),
    (('averaged.update(saved["averaged"])', 'averaged = saved["averaged"]'), "the average is not"),  # binds a local name
    (('torch.set_rng_state(saved["torch"])', "pass"), "next random number"),
    (('np.random.set_state(saved["numpy"])', "pass"), "NumPy's next random number would be another one"),
    ((".tolist()", ""), "torch.load does not open your file (UnpicklingError ... goes in as a list (.tolist())"),
    (("model.state_dict()", "model", 'saved["model"]', 'saved["model"].state_dict()'),
     "has to go through torch.load, which refuses it for torch.nn.modules.container.Sequential"),
    # a cheat: it stays in the process
    (("def pack", "ASIDE = {}\n\n\ndef pack", "return {", "ASIDE.update({", "numpy_state,\n    }", "numpy_state,\n    })\n    return {}", "saved[", "ASIDE["),
     "your code raised KeyError: 'model'"),
    ((OPTIMIZER, "while True: pass"), "after 60 seconds your code has not come to an end: is there a loop without one?"),
    (("return {", "return list({", "numpy_state,\n    }", "numpy_state,\n    }.values())", "    model.load", '    saved = dict(zip(("model", "optimizer", "averaged", "torch", "numpy"), saved))\n    model.load'), PASSED),
    (("    numpy_state = ", "    torch.manual_seed(7)\n    numpy_state = ", 'torch.set_rng_state(saved["torch"])', "torch.manual_seed(7)"), PASSED),
])  # fmt: skip


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


OPENED = "killed right after a.pt was opened for writing, the earlier checkpoint is gone"
PART, REPLACE = 'path.with_suffix(".part")', "os.replace(part, path)"
# on the checkpoint's disk all the same
BESIDE = (
    'with open(part, "wb") as file:',
    'with tempfile.TemporaryDirectory(dir=path.parent.parent) as folder, open(folder + "/new", "wb") as file:',
    "    os.replace(part, path)",
    '        os.replace(folder + "/new", path)',
)

test_survives = table(checks.survives, "01", "save_atomically", [
    ((PART, "path"), OPENED),
    (with_a_way_back, OPENED),
    ((REPLACE, "shutil.copyfile(part, path)"), OPENED),
    ((REPLACE, "path.unlink()\n    os.rename(part, path)"), "killed before a rename, there is no file of that name any more"),
    (in_another_folder, "your second file lies in another folder"),
    ((REPLACE, "return"), "the file still holds the earlier state"),
    ((REPLACE, f'{REPLACE}\n    torch.save(state, path.with_suffix(".bak"))'), "a.bak is left behind"),
    (lambda state, path: 1 / 0, "your code raised ZeroDivisionError"),
    (('open(part, "wb")', "tempfile.NamedTemporaryFile(dir=path.parent, delete=False)", REPLACE, "os.rename(file.name, path)"), PASSED),
    (BESIDE, PASSED),
    (train_ddp.save, PASSED),
], shutil=shutil, tempfile=tempfile)  # fmt: skip


class Net(nn.Module):
    """A small SignNet: seven layers to be frozen, two more, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers[1:])
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


FREEZE, SLEEP = "self.backbone[:7].requires_grad_(False)", "        self.backbone[:7].eval()\n"
NO_TRAIN = "    def train(self, mode=True):\n        super().train(mode)\n" + SLEEP + "        return self\n", ""

test_frozen = table(checks.frozen, "01", "HalfFrozenNet", [
    ((SLEEP, ""), "9 BatchNorm buffers did, backbone.2.running_mean first"),
    ((FREEZE, FREEZE.replace("7", "8")), "too much is frozen: backbone.7.weight"),
    ((FREEZE, "self.requires_grad_(False)"), "no parameter is left to train"),
    ((FREEZE, f"{FREEZE}\n        torch.nn.init.zeros_(self.backbone[1].weight)"), "1 tensors of backbone[:7] are not the trained ones"),
    ((FREEZE, "[p.register_hook(torch.zeros_like) for p in self.backbone[:7].parameters()]"), "frozen parameters moved, backbone.1.weight first"),
    (("super().train(mode)", "super().train()"), "after model.eval(), which is model.train(False), the model is still"),
    (("        return self\n", ""), "model.train() returns None, and not the model"),
    (lambda: None, "returns None; a model is wanted"),
    (("def train(self, mode=True):\n        super().train(mode)", "def forward(self, x):", "return self", "return super().forward(x)"), PASSED),
    ((*NO_TRAIN, FREEZE, "for layer in self.backbone[:7]:\n            layer.requires_grad_(False).eval().train = lambda mode=True, layer=layer: layer"), PASSED),
], Net, "backbone[:7]", SignNet=Net)  # fmt: skip
