"""The runner, started as a user starts it."""

import os
import subprocess
import sys

import pytest

from tests.warm_python import WarmPython
from virtualgpu.run.trials import programs


@pytest.fixture(scope="session")
def clean_environ():
    """The environment without what these tests themselves may run under."""
    return {name: value for name, value in os.environ.items() if name not in ("VIRTUALGPU", "HELPERS_GPUS", "RANK")}


@pytest.fixture(scope="session")
def run(clean_environ, tmp_path_factory):
    """run("--gpus", "2", "program.py"): python -m virtualgpu, in a folder of its own; its output and status."""

    def start(*arguments, environ=(), **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "virtualgpu", *map(str, arguments)],
            env={**clean_environ, **dict(environ)},
            cwd=tmp_path_factory.mktemp("elsewhere"),
            text=True,
            capture_output=True,
            timeout=180,
            **options,
        )

    return start


@pytest.fixture
def script(request, tmp_path):
    """The path of a file, with a space in it, that holds the test module's PROGRAM."""
    path = tmp_path / "train it.py"
    path.write_text(request.module.PROGRAM)
    return str(path)


@pytest.fixture(scope="session")
def warm_python():
    """Forks programs in a tenth of the time that they take to import PyTorch."""
    python = WarmPython()
    yield python
    python.end()


@pytest.fixture
def warm(monkeypatch, request):
    """What `fit` and `--explain` try, in this process, starts warm: for what they make of it, not for the start itself. On Linux; elsewhere
    a fork of so much is not safe, or there is none."""
    if sys.platform == "linux":
        monkeypatch.setattr(programs, "subprocess", request.getfixturevalue("warm_python"))
