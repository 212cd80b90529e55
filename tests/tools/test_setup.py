"""make's set-up: once, again only when something changed, from the start where it was cut off; nothing that somebody else made goes."""

import errno
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import venv
from types import SimpleNamespace

import pytest
import series

import virtualgpu


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """tools/setup.py in a folder of its own, with a pip that notes its calls and fails where it is told to; and what was called."""
    spec = importlib.util.spec_from_file_location("setup_tool", series.ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in module.INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    folder = tmp_path / ".venv"
    for name, value in (
        ("ROOT", tmp_path),
        ("VENV", folder),
        ("STAMP", folder / "finished"),
        ("MARK", folder / "made-by-make"),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100e9))
    calls = SimpleNamespace(made=0, installed=0, fail=None, last=None)
    run = subprocess.run

    def fake_run(command, **options):
        if "-I" in command:  # is the project installed?
            return run(command, **options)
        failed, said = False, "global.index-url='https://a.company/simple'\n"
        if command[-1] == "uv":
            failed = calls.fail == "no uv"
        elif "config" not in command:
            calls.installed += 1
            calls.last = [str(word) for word in command], options.get("env")
            if isinstance(calls.fail, BaseException):
                raise calls.fail
            failed = calls.fail == "no network" or (calls.fail == "uv fails" and "uv" in command)
        return SimpleNamespace(returncode=int(failed), stdout=said)

    class FakeBuilder:
        def __init__(self, **options):
            assert options.pop("with_pip") and set(options) == {"symlinks"}

        def create(self, folder):
            calls.made += 1
            if isinstance(calls.fail, SystemExit):
                raise calls.fail
            module.python_in_venv().parent.mkdir(parents=True)
            module.python_in_venv().symlink_to(sys.executable)

    monkeypatch.setattr(module.subprocess, "run", fake_run)
    monkeypatch.setattr(module, "venv", SimpleNamespace(EnvBuilder=FakeBuilder))
    return module, calls, tmp_path


@pytest.mark.parametrize("fail, installer", [(None, "uv"), ("no uv", "pip"), ("uv fails", "pip")])
def test_uv_installs_from_where_pip_would_and_pip_where_uv_cannot(setup, monkeypatch, fail, installer):
    module, calls, _ = setup
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    calls.fail = fail
    assert module.main() == 0
    command, environ = calls.last
    assert command[2] == installer and command[-1] == "--quiet" and "--extra-index-url" not in command
    assert environ is None or environ["UV_DEFAULT_INDEX"] == "https://a.company/simple"


@pytest.mark.parametrize("driver", [None, "/usr/bin/nvidia-smi"])
def test_pytorch_without_cuda_is_offered_where_there_is_no_driver(setup, monkeypatch, capsys, driver):
    module, calls, root = setup
    monkeypatch.setattr(module.shutil, "which", lambda name: driver)
    monkeypatch.setattr(module.sys, "platform", "linux")
    module.main()
    assert ("make CPU=1 setup" in capsys.readouterr().out) == (driver is None)
    (root / "constraints.txt").write_text("two")
    monkeypatch.setenv("CPU", "1")
    module.main()
    assert calls.last[0][calls.last[0].index("--extra-index-url") + 1] == "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize("between, made, installed", [
    (lambda module, root: None, 1, 1),
    (lambda module, root: (root / "requirements.txt").write_text("two"), 1, 2),  # installed into what is there
    (lambda module, root: (root / ".venv" / "finished").write_text("3.10 " + module.wanted().split()[1]), 2, 2),  # another Python
    (lambda module, root: module.python_in_venv().unlink(), 2, 2),  # which is gone
])  # fmt: skip
def test_a_second_call_does_what_is_needed(setup, between, made, installed):
    module, calls, root = setup
    assert module.main() == 0
    between(module, root)
    assert module.main() == 0
    assert (calls.made, calls.installed) == (made, installed)


def test_a_second_set_up_at_once_waits_and_says_so(setup, capsys):
    fcntl = pytest.importorskip("fcntl")
    module, calls, root = setup
    with open(root / "pyproject.toml") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=module.main, daemon=True)
        waiting.start()
        waiting.join(1)
        assert "this one waits for its end" in capsys.readouterr().out and calls.made == 0
    waiting.join(10)
    assert calls.made == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no groups that Ctrl-C goes to")
def test_ctrl_c_is_answered_in_a_sentence(setup, tmp_path):
    """As in a terminal: all that it has started get the signal, and none of them shows a traceback."""
    module, _, _ = setup
    (tmp_path / "tools").mkdir()
    shutil.copy(module.__file__, tmp_path / "tools")
    code = "import runpy, sys; tool = runpy.run_path('tools/setup.py'); tool['SPACE'].update(cuda=(0, 0), cpu=(0, 0)); sys.exit(tool['main']())"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True, **streams) as running:
        assert "the first time only" in running.stdout.readline()
        time.sleep(0.7)  # pip is being installed
        os.killpg(running.pid, signal.SIGINT)
        said = running.stdout.read()
    assert running.returncode == 130 and "repairs it" in said and "Traceback" not in said


@pytest.mark.parametrize("linked", [False, True])
def test_an_environment_moves_with_its_folder(setup, monkeypatch, linked):
    """Also where a copy's original still stands; and a folder's Korean name is no trouble in an ASCII locale (3.11 died of it)."""
    module, _, root = setup
    here, there = root / "내 노트", root / "there"
    for folder in (here, root / "disk"):
        folder.mkdir()
    (here / "ours.py").touch()
    if linked:
        (here / ".venv").symlink_to(root / "disk")
    monkeypatch.setattr(module, "ROOT", here)
    monkeypatch.setattr(module, "VENV", here / ".venv")
    venv.create((here / ".venv").resolve(), symlinks=True)
    [packages] = (here / ".venv").glob("[Ll]ib/**/site-packages")
    (packages / "__editable__.ours.pth").write_text(str(here), encoding="utf-8")
    module.can_be_moved()
    shutil.copytree(here, there, symlinks=True)
    for folder in (here, there):
        python = folder / module.python_in_venv().relative_to(here)
        command = [python, "-I", "-c", "import ours; print(ascii(ours.__file__))"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"LC_ALL": "C"})
        assert ran.stdout.strip() == ascii(str(folder / "ours.py"))


@pytest.mark.parametrize("realpath", ["/bin/realpath", None])
def test_scripts_find_python_beside_them(setup, monkeypatch, realpath):
    """By a path, a moved folder's would not: uv looks for this line, and its scripts call realpath."""
    module, _, _ = setup
    monkeypatch.setattr(module.shutil, "which", {"realpath": realpath}.get)
    module.main()
    settings = module.VENV / "pyvenv.cfg"
    assert (settings.exists() and settings.read_text("utf-8") == "relocatable = true\n") == bool(realpath)


def interrupted(module, calls, root):
    calls.fail = KeyboardInterrupt()
    assert module.main() == 130


def killed(module, calls, root):
    """The half-made folder stays, without its stamp."""
    (root / ".venv").mkdir()
    (root / ".venv" / "made-by-make").touch()
    calls.made += 1


def an_update(module, calls, root):
    module.main()
    (root / "constraints.txt").write_text("two")
    interrupted(module, calls, root)


def behind_a_link(module, calls, root):
    """On another disk, say: the link stays."""
    (root / "elsewhere").mkdir()
    (root / ".venv").symlink_to("elsewhere")
    interrupted(module, calls, root)


def while_starting_over(module, calls, root):
    """What is left is known to be make's."""
    killed(module, calls, root)
    (root / ".venv" / "lib").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda path: os.kill(os.getpid(), 2))
        assert module.main() == 130


@pytest.mark.parametrize("cut_off", [interrupted, killed, an_update, behind_a_link, while_starting_over])
def test_what_was_cut_off_in_the_middle_is_made_anew(setup, ctrl_c, capsys, cut_off):
    module, calls, root = setup
    cut_off(module, calls, root)
    assert cut_off is killed or "repairs it" in capsys.readouterr().out
    (root / ".venv" / "half-written").touch()
    calls.fail, is_link = None, (root / ".venv").is_symlink()
    assert module.main() == 0 and "starting over" in capsys.readouterr().out
    assert calls.made == 2 and not (root / ".venv" / "half-written").exists()
    assert (root / ".venv").is_symlink() == is_link and (root / ".venv" / "finished").exists()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("installed", [True, False])
def test_an_environment_made_by_hand_is_left_alone(setup, capsys, linked, installed):
    """As the README says under "Without make"; it was removed, and fetched again."""
    module, calls, root = setup
    if linked:
        (root / "elsewhere").mkdir()
        (root / ".venv").symlink_to("elsewhere")
    venv.create((root / ".venv").resolve())
    metadata = "Name: beyond-one-gpu\nVersion: 1.0\n"
    elsewhere = root / "beyond_one_gpu.egg-info"  # of an earlier environment: it says nothing of this one
    elsewhere.mkdir()
    (elsewhere / "PKG-INFO").write_text(metadata)
    if installed:
        [packages] = (root / ".venv").glob("[Ll]ib/**/site-packages")
        (packages / "beyond_one_gpu-1.0.dist-info").mkdir()
        (packages / "beyond_one_gpu-1.0.dist-info" / "METADATA").write_text(metadata)
    content = sorted((root / ".venv").rglob("*"))
    assert module.main() == (0 if installed else 1)
    assert (calls.made, calls.installed) == (0, 0) and sorted((root / ".venv").rglob("*")) == content
    [said] = capsys.readouterr().out.splitlines()
    assert ("uses it as it is" if installed else "-m pip install -c constraints.txt -e") in said and "remove it" in said


def read_only(path, **options):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


@pytest.mark.parametrize("change, said", [
    (lambda module, calls, venv, patch: venv.touch(), "is a file, and set-up needs that name: rename or remove it, then try again"),
    (lambda module, calls, venv, patch: venv.symlink_to("nowhere"), "is a link to nothing"),
    (lambda module, calls, venv, patch: patch(module.Path, "mkdir", read_only), "could not be written (Read-only file system): copy the project"),
    (lambda module, calls, venv, patch: setattr(calls, "fail", "no network"), "Is there a network?"),
    (lambda module, calls, venv, patch: setattr(calls, "fail", SystemExit(1)), "apt install python3-venv"),
    (lambda module, calls, venv, patch: patch(module, "sys", SimpleNamespace(version_info=(3, 9, 1), version="3.9.1 x")), "3.11 or newer"),
])  # fmt: skip
def test_what_fails_names_the_cure(setup, monkeypatch, capsys, change, said):
    module, calls, root = setup
    change(module, calls, root / ".venv", monkeypatch.setattr)
    assert module.main() == 1 and said in capsys.readouterr().out.splitlines()[-1]
    assert not (root / ".venv" / "finished").exists() and calls.made == (calls.fail is not None)


@pytest.mark.parametrize("answers", [True, False])
def test_pytorch_with_cuda_is_not_taken_for_one_without(setup, monkeypatch, capsys, answers):
    """Its index did not answer: pip asked it for 200 packages, in half an hour, and took the registry's."""
    module, calls, _ = setup
    monkeypatch.setenv("CPU", "1")
    monkeypatch.setattr(module, "index_answers", lambda: answers)
    calls.fail = "uv fails"
    assert module.main() == (0 if answers else 1) and calls.installed == 1 + answers
    assert ("PYTORCH_INDEX=" in capsys.readouterr().out) != answers


@pytest.mark.parametrize("system, free, said", [
    ("linux", 9, "9.0 GB free on this disk, about 10 GB are needed"),
    ("darwin", 1, "1.0 GB free on this disk, about 3 GB are needed"),
    ("win32", 4, "about 2 GB, the first time only"),
])  # fmt: skip
def test_a_full_disk_is_said_before_anything_is_downloaded(setup, monkeypatch, capsys, system, free, said):
    module, calls, _ = setup
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * 1e9))
    monkeypatch.setattr(module.sys, "platform", system)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)  # Windows' way asks Windows
    status = module.main()
    assert said in capsys.readouterr().out
    assert (status, calls.made > 0) == ((0, True) if "first time" in said else (1, False))


def test_where_the_environment_is_a_link_the_other_disk_is_asked(setup, monkeypatch, capsys):
    module, calls, root = setup
    (root / "elsewhere").mkdir()
    module.VENV.symlink_to("elsewhere")
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9 if path == module.VENV else 1e11)
    )
    assert module.main() == 1 and "1.0 GB free on this disk" in capsys.readouterr().out and calls.made == 0


def test_it_needs_the_standard_library_only():
    """It runs before anything is installed: -I -S leaves it no third-party module at all."""
    code = "import runpy, sys; sys.argv = ['x']; runpy.run_path('tools/setup.py', run_name='not main')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=series.ROOT, check=True)


def test_one_version_of_the_engine_and_one_of_pytorch():
    newest = re.search(r"^## (\S+)", (series.ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
    assert newest == virtualgpu.__version__
    course = tomllib.loads((series.ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["series"]
    assert f'version: "{course["tag"]}"' in (series.ROOT / "CITATION.cff").read_text("utf-8")
    of_the_package = tomllib.loads((series.ROOT / "virtualgpu/pyproject.toml").read_text("utf-8"))["project"]
    (torch,) = of_the_package["dependencies"]
    assert torch in (series.ROOT / "requirements.txt").read_text("utf-8").splitlines()
