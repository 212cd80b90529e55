"""Folders and programs whose names have spaces and Korean letters, also in a locale that knows ASCII alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PROGRAM = """
import os, subprocess, torch, virtualgpu
import torch.distributed as dist
from virtualgpu.run.ranks import WorkerError, launch


def 일():
    x = torch.ones(1_000_000, device="cuda")
    dist.all_reduce(x)
    print("안녕", end="")
    return x[0].item(), os.path.dirname(virtualgpu.__file__)


def 기다림():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), src=0)


if __name__ == "__main__":
    (zero, folder), (one, _) = launch(일)
    try:
        launch(기다림, timeout=1)
    except WorkerError as error:
        print(error.places[0])
    print(zero, one, folder == os.environ["PYTHONPATH"].split(os.pathsep)[-1] + "/virtualgpu")
    torch.ones(1_000_000, device="cuda:1")
    print(len(subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.splitlines()))
"""


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["utf-8", "ascii"])
def test_the_runner_and_ranks(clean_environ, tmp_path, locale):
    if locale and not torch.__file__.isascii():
        pytest.skip("PyTorch that is itself in a folder with such a name cannot be imported in that locale")
    folder = tmp_path / "여러 GPU 폴더"
    (folder / "임시 파일").mkdir(parents=True)
    (folder / "virtualgpu").symlink_to(ROOT / "virtualgpu")
    (folder / "내 프로그램.py").write_text(PROGRAM, "utf-8")
    (folder / "내 카드.toml").write_text('base = "T4"\nname = "내 카드"\n', "utf-8")
    environ = {**clean_environ, **locale, "PYTHONPATH": str(folder), "TMPDIR": str(folder / "임시 파일")}
    options = ["--like", "내 카드.toml", "--gpus", "2", "--report", "--trace", "추적.json"]
    command = [sys.executable, "-m", "virtualgpu", *options, "내 프로그램.py"]
    found = subprocess.run(command, env=environ | {"OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True)
    said, told = found.stdout.decode("utf-8").splitlines(), found.stderr.decode("utf-8")
    assert found.returncode == 0, told
    assert said[2:] == ["rank 0 is done, and waits for the others", "2.0 2.0 True", "2"]
    assert (
        "3 processes" in told
        and "Trace of 3 processes in " in told
        and "without" not in told
        and "Report" not in told
        and "of 14.74 GiB" in told
    )
    trace = json.loads((folder / "추적.json").read_text("utf-8"))
    assert any(event.get("cat") == "communication" for event in trace["traceEvents"])
    if not locale:
        assert said[:2] == ["[rank 0] 안녕", "[rank 1] 안녕"] and "내 프로그램.py:" in told


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="a virtual environment can be linked to")
def test_a_folder_from_which_rays_workers_do_not_start(clean_environ, tmp_path):
    """Ray's launcher does not quote the path, and the program would wait for ever. A stand-in for Ray: its start takes seconds."""
    folder = tmp_path / "my course"
    folder.mkdir()
    (folder / "venv").symlink_to(sys.prefix)
    (folder / "ray.py").write_text("def init(**options):\n    print('started', *options)\n")
    cured = "ray.init(runtime_env={'py_executable': 'quoted'})"
    (folder / "search.py").write_text(f"import ray\nprint(1)\n{cured}\nray.init(num_cpus=1)\n")
    command = [folder / "venv" / "bin" / "python", "-m", "virtualgpu", "--quiet", "search.py"]
    environ = {**clean_environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    found = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    assert found.stdout == "1\nstarted runtime_env\nstarted num_cpus\n", found.stderr
    assert found.stderr.startswith(f"{folder}/search.py:4: UserWarning: Ray's workers with a runtime_env")
    assert f"do not start from '{folder}/venv/bin/python'" in found.stderr
    assert "shlex.quote(sys.executable)" in found.stderr and found.stderr.count("UserWarning") == 1
