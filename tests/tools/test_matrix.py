"""`make matrix`: a session whose Python or browser is not there fails; skipped, it would have tested nothing and still be green."""

import os
import runpy
import subprocess
import sys
from types import SimpleNamespace

import series


def test_a_missing_python_is_no_success(monkeypatch):
    def decorator(*arguments, **options):
        return arguments[0] if arguments and callable(arguments[0]) else lambda function: function

    options = SimpleNamespace()
    nox = SimpleNamespace(options=options, session=decorator, parametrize=decorator, Session=object)
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setenv("UV_COMPILE_BYTECODE", "1")  # noxfile.py sets it
    runpy.run_path(str(series.ROOT / "noxfile.py"))
    assert options.error_on_missing_interpreters is True


def test_a_missing_browser_is_no_success(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/browser"]
    environ = os.environ | {"PATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=series.ROOT, env=environ, capture_output=True, text=True)
    assert ran.returncode == 1 and "no chromium here: apt install chromium" in ran.stdout
