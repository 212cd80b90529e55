"""notebooks/scripts/train_ddp.py under torchrun, on virtual GPUs: what a killed training leaves is gone on from, to the same weights.

Its outputs on one node and two, the weights after a restart, and spawn_ddp.py's gradient are notebook 08's."""

import os
import subprocess
import sys

import torch
from series import NOTEBOOKS

from tests.processes import family

SCRIPT = NOTEBOOKS / "scripts" / "train_ddp.py"


def start(*options):
    # torchrun sets the threads itself where a node has several processes; the last bits depend on their number
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    gpus = ["-m", "virtualgpu", "--gpus", "2", "--quiet"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *gpus, *torchrun, str(SCRIPT), *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(run):
    said, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    return said.splitlines()


def weights(path):
    return torch.load(path, map_location="cpu")["model"]


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_without_a_restart_the_checkpoint_is_there_to_go_on_from(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path))
    undisturbed = start("--checkpoint", tmp_path / "undisturbed.pt")
    run = start("--checkpoint", tmp_path / "a.pt", "--die-in-epoch", 2)
    lines = finished(undisturbed)
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}" for i in range(4)]
    said, errors = run.communicate(timeout=300)
    assert run.returncode != 0 and "SIGKILL" in errors and said.splitlines() == lines[:2]
    assert not family("MARK", str(tmp_path))

    assert finished(start("--checkpoint", tmp_path / "a.pt")) == lines[2:]
    assert equal(weights(tmp_path / "a.pt"), weights(tmp_path / "undisturbed.pt"))
