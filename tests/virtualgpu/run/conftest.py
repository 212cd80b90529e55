"""The runner, started as a user starts it."""

import os
import signal
import subprocess
import sys

import pytest

from tests import forks
from virtualgpu.run import trials
from virtualgpu.run.prefork import ScriptServer

RUNNER = [sys.executable, "-m", "virtualgpu"]


@pytest.fixture(scope="session")
def clean_environ():
    """The environment without what these tests themselves may run under."""
    ours = ("VIRTUALGPU", "HELPERS_GPUS", "RANK")
    return {name: value for name, value in forks.environment().items() if name not in ours}


@pytest.fixture(scope="session")
def run(clean_environ, tmp_path_factory):
    """run("--gpus", "2", "program.py"): python -m virtualgpu, in a folder of its own; its output and status. Runner and program are forked
    (tests/forks.py) unless anew is true."""

    def start(*arguments, environ=(), anew=False, **options) -> subprocess.CompletedProcess:
        options |= {"env": {**clean_environ, **dict(environ)}, "cwd": tmp_path_factory.mktemp("elsewhere")}
        if not anew:
            return forks.run("-m", "virtualgpu", *arguments, timeout=180, **options)
        command = [*RUNNER, *map(str, arguments)]
        return subprocess.run(command, text=True, capture_output=True, timeout=180, **options)

    return start


@pytest.fixture
def start(clean_environ, tmp_path):
    """start("-c", code): the runner in a process group of its own, with this test's folder for what is temporary; a Popen."""
    started = []

    def start(*arguments, **options) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE, "start_new_session": True, **options}
        environ = {**clean_environ, "TMPDIR": str(tmp_path)}
        started.append(subprocess.Popen([*RUNNER, *arguments], env=environ, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is None or not process.stdout.closed:
            process.communicate()


@pytest.fixture
def script(request, tmp_path):
    """The path of a file, with a space in it, that holds the test module's PROGRAM."""
    path = tmp_path / "train it.py"
    path.write_text(request.module.PROGRAM)
    return str(path)


class Shared(ScriptServer):
    """One for all searches of a session: no test waits until PyTorch is imported again."""

    def end(self):
        """A search has ended, not the session."""


@pytest.fixture(scope="session")
def shared():
    python = Shared()
    yield python
    ScriptServer.end(python)


@pytest.fixture
def warm(monkeypatch, shared):
    """What `fit` and `--explain` try in this test starts from the session's server."""
    monkeypatch.setattr(trials, "ScriptServer", lambda: shared)
