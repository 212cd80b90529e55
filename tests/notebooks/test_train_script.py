"""notebooks/scripts/train_ddp.py under torchrun, on virtual GPUs: what a killed training leaves.

Its outputs on one node and two, the weights after a restart, and spawn_ddp.py's gradient are notebook 08's."""

import os
import subprocess
import sys

import series
import torch

from tests.processes import family

NOTEBOOK = series.NOTEBOOKS / "08_when_ddp_goes_wrong.ipynb"
SCRIPT = series.NOTEBOOKS / "scripts" / "train_ddp.py"


def test_a_rank_that_is_killed_leaves_a_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    """What a start from it then prints, and its weights, are what an undisturbed training has: an output of notebook 08."""
    monkeypatch.setenv("MARK", str(tmp_path))
    shown = next(cell for cell in series.code_cells(series.read(NOTEBOOK)) if "undisturbed.pt" in cell.source)
    lines = [line for line in shown.outputs[0].text.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}" for i in range(3)]
    # torchrun sets the threads itself where a node has several processes; the last bits depend on their number
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    gpus = ["-m", "virtualgpu", "--gpus", "2", "--quiet"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    scripts = [str(SCRIPT.with_name("kill_rank_1.py")), str(SCRIPT), "--checkpoint", str(tmp_path / "a.pt")]
    command = [sys.executable, *gpus, *torchrun, *scripts]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode != 0 and "SIGKILL" in run.stderr and run.stdout.splitlines() == lines[:2]
    assert not family("MARK", str(tmp_path))
    assert torch.load(tmp_path / "a.pt", map_location="cpu")["epoch"] == 1 and not list(tmp_path.glob("*.part"))


def test_a_truncated_checkpoint_is_refused_in_a_sentence(tmp_path):
    torch.save({"model": torch.zeros(1000)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 600)
    command = [
        sys.executable,
        "-m",
        "virtualgpu",
        "--gpus",
        "1",
        "--quiet",
        "-m",
        "torch.distributed.run",
        "--standalone",
    ]
    run = subprocess.run(
        [*command, str(SCRIPT), "--checkpoint", str(tmp_path / "a.pt")], capture_output=True, text=True
    )
    assert (
        run.returncode
        and "a.pt is truncated, or no checkpoint" in run.stderr
        and "Load an earlier checkpoint" in run.stderr
    )
