"""notebooks/scripts/train_ddp.py under torchrun, on virtual GPUs: what a killed training leaves is gone on from.

Its outputs on one node and two, the weights after a restart, and spawn_ddp.py's gradient are notebook 08's."""

import os
import subprocess
import sys

import series

from tests.processes import family

NOTEBOOK = series.NOTEBOOKS / "08_ddp_in_the_wild.ipynb"
SCRIPT = series.NOTEBOOKS / "scripts" / "train_ddp.py"


def start(*options, scripts=(SCRIPT,)):
    # torchrun sets the threads itself where a node has several processes; the last bits depend on their number
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    gpus = ["-m", "virtualgpu", "--gpus", "2", "--quiet"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *gpus, *torchrun, *map(str, (*scripts, *options))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_without_a_restart_the_checkpoint_is_there_to_go_on_from(tmp_path, monkeypatch):
    """What it prints then is what an undisturbed training does, whose output notebook 08 keeps."""
    monkeypatch.setenv("MARK", str(tmp_path))
    shown = next(cell for cell in series.code_cells(series.read(NOTEBOOK)) if "undisturbed.pt" in cell.source)
    lines = [line for line in shown.outputs[0].text.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}" for i in range(3)]
    run = start("--checkpoint", tmp_path / "a.pt", scripts=(SCRIPT.with_name("kill_rank_1.py"), SCRIPT))
    said, errors = run.communicate(timeout=300)
    assert run.returncode != 0 and "SIGKILL" in errors and said.splitlines() == lines[:2]
    assert not family("MARK", str(tmp_path))

    run = start("--checkpoint", tmp_path / "a.pt")
    said, errors = run.communicate(timeout=300)
    assert (run.returncode, said.splitlines()) == (0, lines[2:]), errors
