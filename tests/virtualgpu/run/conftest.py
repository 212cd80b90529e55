"""The runner, started as a user starts it."""

import subprocess
import sys

import pytest

from tests import forks
from virtualgpu.run.trials import forked
from virtualgpu.run.trials.forked import WarmPython


@pytest.fixture(scope="session")
def clean_environ():
    """The environment without what these tests themselves may run under."""
    return {
        name: value for name, value in forks.environment().items() if name not in ("VIRTUALGPU", "HELPERS_GPUS", "RANK")
    }


@pytest.fixture(scope="session")
def run(clean_environ, tmp_path_factory):
    """run("--gpus", "2", "program.py"): python -m virtualgpu, in a folder of its own; its output and status. Runner and program are forked
    (tests/forks.py) unless anew is true."""

    def start(*arguments, environ=(), anew=False, **options) -> subprocess.CompletedProcess:
        options |= {
            "env": {**clean_environ, **dict(environ)},
            "cwd": tmp_path_factory.mktemp("elsewhere"),
            "timeout": 180,
        }
        if not anew:
            return forks.run("-m", "virtualgpu", *arguments, **options)
        command = [sys.executable, "-m", "virtualgpu", *map(str, arguments)]
        return subprocess.run(command, text=True, capture_output=True, **options)

    return start


@pytest.fixture
def script(request, tmp_path):
    """The path of a file, with a space in it, that holds the test module's PROGRAM."""
    path = tmp_path / "train it.py"
    path.write_text(request.module.PROGRAM)
    return str(path)


class Shared(WarmPython):
    """One for all searches of a session: no test waits until PyTorch is imported again."""

    def start(self, command, environ, output):
        environ = {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}
        return super().start(command, environ, output)

    def end(self):
        """A search has ended, not the session."""


@pytest.fixture(scope="session")
def shared():
    python = Shared()
    yield python
    WarmPython.end(python)


@pytest.fixture
def warm(monkeypatch, shared):
    """What `fit` and `--explain` try in this test starts from the session's warm Python."""
    monkeypatch.setattr(forked, "WarmPython", lambda: shared)
