"""make's set-up: once, again only when something changed, and from the start where it was cut off."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import series


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """tools/setup.py in a folder of its own, with a pip that notes its calls and fails where it is told to."""
    spec = importlib.util.spec_from_file_location("setup_tool", series.ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in module.INPUTS:
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "finished")
    # What this machine's disk has free is not what is tested.
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100e9))
    calls = SimpleNamespace(made=0, installed=0, fail=None)

    def fake_run(command, **options):
        if "venv" in command:
            calls.made += 1
            module.python_in_venv().parent.mkdir(parents=True)
            module.python_in_venv().touch()
            return SimpleNamespace(returncode=0)
        calls.installed += 1
        if isinstance(calls.fail, BaseException):
            raise calls.fail
        return SimpleNamespace(returncode=0 if calls.fail is None else 1)

    monkeypatch.setattr(module.subprocess, "run", fake_run)
    return module, calls, tmp_path


def test_a_second_call_does_not_install_again(setup):
    module, calls, _ = setup
    assert module.main() == 0 and module.main() == 0
    assert (calls.made, calls.installed) == (1, 1)


def test_a_changed_requirement_is_installed_into_what_is_there(setup):
    module, calls, root = setup
    module.main()
    (root / "requirements.txt").write_text("two")
    assert module.main() == 0
    assert (calls.made, calls.installed) == (1, 2)


@pytest.mark.parametrize("cut", [KeyboardInterrupt(), None])
def test_a_set_up_cut_off_in_the_middle_is_repaired(setup, capsys, cut):
    """Interrupted, or killed: the half-made folder stays, without its stamp."""
    module, calls, root = setup
    if cut:
        calls.fail = cut
        assert module.main() == 130
        assert "repairs it" in capsys.readouterr().out
        calls.fail = None
    else:
        (root / ".venv" / "lib").mkdir(parents=True)
    (root / ".venv" / "half-written").touch()
    assert module.main() == 0
    assert "starting over" in capsys.readouterr().out
    assert not (root / ".venv" / "half-written").exists()


def test_an_update_cut_off_in_the_middle_is_repaired_too(setup):
    module, calls, root = setup
    module.main()
    (root / "constraints.txt").write_text("two")
    calls.fail = KeyboardInterrupt()
    module.main()
    calls.fail = None
    assert module.main() == 0
    assert calls.made == 2, "made anew"


def test_another_python_makes_a_new_folder(setup):
    module, calls, root = setup
    module.main()
    (root / ".venv" / "finished").write_text("3.10 " + module.wanted().split()[1])
    module.main()
    assert calls.made == 2


def test_a_failed_install_names_the_cure(setup, capsys):
    module, calls, root = setup
    calls.fail = "no network"
    (root / ".venv").mkdir()
    assert module.main() == 1
    assert "Is there a network?" in capsys.readouterr().out
    assert not (root / ".venv" / "finished").exists()


def test_a_full_disk_is_said_before_anything_is_downloaded(setup, monkeypatch, capsys):
    module, calls, _ = setup
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    assert module.main() == 1
    assert "1.0 GB free" in capsys.readouterr().out and calls.made == 0


def test_an_old_python_is_refused(setup, monkeypatch, capsys):
    module, _, _ = setup
    monkeypatch.setattr(module, "sys", SimpleNamespace(version_info=(3, 9, 1), version="3.9.1 x"))
    assert module.main() == 1
    assert "3.11 or newer" in capsys.readouterr().out


def test_it_needs_the_standard_library_only():
    """It runs before anything is installed: -I -S leaves it no third-party module at all."""
    code = "import runpy, sys; sys.argv = ['x']; runpy.run_path('tools/setup.py', run_name='not main')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=Path(series.ROOT), check=True)
