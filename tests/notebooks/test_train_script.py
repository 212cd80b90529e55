"""notebooks/scripts/train_ddp.py under torchrun, on virtual GPUs: what a killed training run leaves, on two nodes, and under SLURM; and the
terminals that notebook 09 starts it in.

Its outputs on one node, the weights after a restart, a node that dies, and spawn_ddp.py's gradient are notebook 09's."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import series
import torch

from notebooks.scripts import terminal
from tests import forks
from tests.processes import family, wait_until

NOTEBOOK = series.NOTEBOOKS / "09_launch_and_survive.ipynb"
SCRIPT = series.NOTEBOOKS / "scripts" / "train_ddp.py"
SLURM = SCRIPT.with_suffix(".slurm")


@pytest.fixture
def terminals(monkeypatch):
    """As in the notebook, but that each program is forked from a Python that has PyTorch."""
    monkeypatch.setattr(terminal, "subprocess", SimpleNamespace(Popen=forks.Popen, PIPE=subprocess.PIPE))
    return terminal.terminals


def test_a_rank_that_is_killed_leaves_a_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    """What a start from it then prints, and its weights, are what an undisturbed run has: an output of notebook 09."""
    monkeypatch.setenv("MARK", str(tmp_path))
    shown = next(cell for cell in series.code_cells(series.read(NOTEBOOK)) if "whole.pt" in cell.source)
    lines = shown.outputs[0].text.splitlines()
    assert [line.split()[0] for line in lines] == ["RANK"] * 2 + ["epoch"] * 4
    # torchrun sets the threads itself where a node has several processes; the last bits depend on their number
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    gpus = ["-m", "virtualgpu", "--gpus", "2", "--quiet"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    scripts = [str(SCRIPT.with_name("kill.py")), "rank", str(SCRIPT), "--checkpoint", str(tmp_path / "a.pt")]
    command = [sys.executable, *gpus, *torchrun, *scripts]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode != 0 and "SIGKILL" in run.stderr and run.stdout.splitlines() == lines[:4]
    assert not family("MARK", str(tmp_path))
    saved = torch.load(tmp_path / "a.pt", map_location="cpu")
    assert saved["epoch"] == 1 and len(saved["generators"]) == 2 and not list(tmp_path.glob("*.part"))


def test_a_truncated_checkpoint_is_refused_in_a_sentence(tmp_path):
    torch.save({"model": torch.zeros(1000)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 600)
    torchrun = ("-m", "torch.distributed.run", "--standalone", SCRIPT, "--checkpoint", tmp_path / "a.pt")
    run = forks.run("-m", "virtualgpu", "--gpus", "1", "--quiet", *torchrun)
    assert run.returncode and "a.pt is truncated, or no checkpoint" in run.stderr
    assert "Load an earlier checkpoint" in run.stderr


NODE = "torchrun --nnodes=2 --nproc-per-node={} --rdzv-id=1 --rdzv-backend=c10d --rdzv-endpoint=first-node:29500 --rdzv-conf=join_timeout=120"


def test_two_nodes_of_two_are_one_of_four(terminals, tmp_path, capsys):
    """Bit for bit, generators included."""
    terminals(tmp_path, "torchrun --standalone --nproc-per-node=4 train_ddp.py --checkpoint one.pt --epochs 2")
    one = capsys.readouterr().out.splitlines()
    terminals(tmp_path, *[f"{NODE.format(2)} train_ddp.py --checkpoint two.pt --epochs 2"] * 2)
    two = capsys.readouterr().out.splitlines()
    assert one[4:] == two[4:] and len(one) == 6 and one[0].endswith("cuda:0 of 4")
    assert two[2] == "RANK 2  LOCAL_RANK 0  GROUP_RANK 1  cuda:0 of 2"
    first, second = (torch.load(tmp_path / name, map_location="cpu") for name in ("one.pt", "two.pt"))
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    pairs = zip(first["generators"], second["generators"], strict=True)
    assert all(torch.equal(a[kind], b[kind]) for a, b in pairs for kind in ("cpu", "cuda"))


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_slurm_script_starts_an_agent_on_each_node(tmp_path):
    """With stand-ins for the three programs that a cluster has."""
    for name, line in {
        "scontrol": "printf 'node1\\nnode2\\n'",
        "srun": 'echo "cpus $SRUN_CPUS_PER_TASK"; echo "$@"; shift; "$@"',
        "torchrun": 'echo "torchrun started"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", SLURM], capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and not run.stderr
    cpus, line, started = run.stdout.splitlines()
    assert cpus == "cpus 64" and started == "torchrun started"
    assert line.startswith("--kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 --rdzv-id=7")
    assert "--rdzv-endpoint=node1:29500 train_ddp.py" in line
    options = [line.split()[1].split("=")[0] for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--cpus-per-task", "--time", "--requeue", "--signal"} <= set(options)


IN_A_CELL = """
import sys
from pathlib import Path
from notebooks.scripts import terminal
terminal.terminals(Path(sys.argv[1]), *[sys.argv[2]] * 2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal there")
def test_an_interrupted_cell_leaves_no_process(tmp_path):
    """Ctrl-C reaches the notebook's process, as Stop in JupyterLab does it."""
    environment = os.environ | {"MARK": str(tmp_path)}
    typed = f"{NODE.format(1)} train_ddp.py --checkpoint a.pt --epochs 10000"
    command, pipe = [sys.executable, "-c", IN_A_CELL, tmp_path, typed], subprocess.PIPE
    cell = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        # by rank 0, which the order of the agents' addresses puts into the first command
        assert any(line.startswith("epoch 0") for line in cell.stdout)
        assert len(family("MARK", str(tmp_path))) > 4
        cell.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in cell.communicate(timeout=60)[1]
        wait_until(lambda: not family("MARK", str(tmp_path)))
    finally:
        for process in family("MARK", str(tmp_path)):
            process.kill()


def test_a_command_that_fails_says_why(terminals, tmp_path, capsys):
    terminals(tmp_path, "python no_such_script.py")
    assert "no_such_script.py" in capsys.readouterr().out
