"""`make matrix`: a session whose Python is not there fails; skipped, it would have tested nothing and still be green."""

import runpy
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
