"""notebooks/scripts/train_ddp.py under torchrun, on virtual GPUs: on one node and two, killed and started again, always to the same weights.

That spawn_ddp.py gives one process's gradient is an output of notebook 08."""

import os
import subprocess
import sys

import pytest
import torch
from series import NOTEBOOKS

from tests.processes import free_port

SCRIPT = NOTEBOOKS / "scripts" / "train_ddp.py"
STANDALONE = ["--standalone", "--nproc-per-node=2"]


def start(launcher, *options):
    # torchrun sets the threads itself where a node has several processes; the last bits depend on their number
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    gpus = ["-m", "virtualgpu", "--gpus", "2", "--quiet"]
    command = [sys.executable, *gpus, "-m", "torch.distributed.run", *launcher, str(SCRIPT), *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(run):
    said, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    return said.splitlines()


def weights(path):
    return torch.load(path, map_location="cpu")["model"]


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "weights.pt"
    lines = finished(start(STANDALONE, "--checkpoint", path))
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}" for i in range(4)]
    return lines, weights(path)


def test_a_killed_rank_costs_nothing(undisturbed, tmp_path):
    run = start([*STANDALONE, "--max-restarts=1"], "--checkpoint", tmp_path / "a.pt", "--die-in-epoch", 2)
    assert finished(run) == undisturbed[0]
    assert equal(weights(tmp_path / "a.pt"), undisturbed[1])


def test_without_a_restart_the_checkpoint_is_there_to_go_on_from(undisturbed, tmp_path):
    run = start(STANDALONE, "--checkpoint", tmp_path / "a.pt", "--die-in-epoch", 2)
    said, errors = run.communicate(timeout=300)
    assert run.returncode != 0 and "SIGKILL" in errors and said.splitlines() == undisturbed[0][:2]
    assert finished(start(STANDALONE, "--checkpoint", tmp_path / "a.pt")) == undisturbed[0][2:]
    assert equal(weights(tmp_path / "a.pt"), undisturbed[1])


def test_two_nodes_give_the_same(undisturbed, tmp_path):
    meet = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    nodes = [start([*meet, "--rdzv-id=test"], "--checkpoint", tmp_path / "a.pt") for _ in range(2)]
    assert sorted(len(finished(node)) for node in nodes) == [0, 4]
    assert equal(weights(tmp_path / "a.pt"), undisturbed[1])
