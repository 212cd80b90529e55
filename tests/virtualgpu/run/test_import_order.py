"""What is imported when: no torch by the runner; under it a program may import any part of virtualgpu before torch, and one session is on."""

import subprocess
import sys

import pytest

FIRST = [
    "from virtualgpu.torch_api import streams",
    "import importlib.util; assert importlib.util.find_spec('virtualgpu.session'); from virtualgpu.hardware import specs; "
    "import virtualgpu.session as s; assert s._session.cards[0] == specs.find_spec('T4')",
]
THEN = """
import torch
from virtualgpu import session
from virtualgpu.engine import machine, storage
assert torch.cuda.device_count() == 2
assert session._session is not None
there = torch.ones(2, device="cuda:1")
assert isinstance(storage.gpu_of(there), machine.GPU)
print(there.device, end="")
"""


@pytest.mark.parametrize("first", FIRST)
def test_what_comes_first(run, first):
    done = run("--gpus", "2", "--quiet", "-c", first + THEN, anew=True)
    assert (done.stdout, done.stderr) == ("cuda:1", "")


def test_a_pytest_plugin_that_imports_it_before_torch(run, tmp_path):
    """pytest loads the modules of a plugin's package by an importer of its own."""
    (tmp_path / "early.py").write_text("import virtualgpu\nassert virtualgpu.machine() is not None\n")
    (tmp_path / "test_early.py").write_text(
        "import torch\n\ndef test_there():\n    assert torch.ones(2, device='cuda:1').sum() == 2\n"
    )
    arguments = ["-m", "pytest", "-q", "-p", "early", "-p", "no:cacheprovider", tmp_path / "test_early.py"]
    done = run("--gpus", "2", "--quiet", *arguments, environ={"PYTHONPATH": str(tmp_path)}, anew=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_runner_itself_imports_no_torch_and_nothing_that_windows_has_not():
    code = """if True:
        import sys
        sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios"])
        from virtualgpu.run import cli, launcher, ranks
        import virtualgpu.run.explain.cli, virtualgpu.run.fit.cli
        cli._settings(cli.parse("--dry --world-size 8 --network NDR --like A100 x.py".split()))
        print(launcher.find_cards(2, "A100", "16GB")[1].memory, "torch" in sys.modules)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(16 << 30), "False"]
