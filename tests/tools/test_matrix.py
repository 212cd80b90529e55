"""noxfile.py: a session whose Python or browser is not there fails; skipped, it would have tested nothing and still be green."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import series

from tests.browser.conftest import SLIDERS, installed


@pytest.fixture
def noxfile(monkeypatch):
    """What noxfile.py defines, read without nox, and the options that it sets."""

    def decorator(*arguments, **options):
        return arguments[0] if arguments and callable(arguments[0]) else lambda function: function

    options = SimpleNamespace()
    nox = SimpleNamespace(options=options, session=decorator, parametrize=decorator, Session=object)
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setenv("UV_COMPILE_BYTECODE", "1")  # noxfile.py sets it
    return SimpleNamespace(**runpy.run_path(str(series.ROOT / "noxfile.py")), options=options)


def test_a_missing_python_is_no_success(noxfile):
    assert noxfile.options.error_on_missing_interpreters is True


def test_stored_outputs_are_compared_on_other_processors(noxfile):
    """02 once printed a loss that hung on the processor's vector instructions: `make test` was red elsewhere."""
    assert {settings.get("ATEN_CPU_CAPABILITY") for settings in noxfile.PROCESSORS.values()} >= {"default", "avx2"}
    assert {f"processors({name})" for name in noxfile.PROCESSORS} <= set(noxfile.options.sessions)


def test_they_are_compared_on_one_thread(noxfile):
    """In the session of Python 3.12, with the versions behind them."""
    runs = []
    session = SimpleNamespace(
        posargs=[], install=lambda *words: None, run=lambda *words, env: runs.append((words, env))
    )
    noxfile.test(session, "pinned")
    ((words, env),) = runs
    assert env == {"OMP_NUM_THREADS": "1"} and {"--nbval", "notebooks"} <= set(words)
    assert "test-3.12(pinned)" in noxfile.options.sessions


def test_a_missing_browser_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="no chromium here: apt install chromium"):
        installed()


def test_the_browsers_lesson_has_answers_with_sliders_and_solutions():
    cells = series.code_cells(series.read(series.NOTEBOOKS / f"{SLIDERS}.ipynb"))
    pages = [output.get("data", {}).get("text/html", "") for cell in cells for output in cell.outputs]
    assert any("The answer" in page and '<figure class="frames"' in page for page in pages)
    assert any("solution" in series.tags(cell) for cell in cells)
