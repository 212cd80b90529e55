"""What everybody types: torchrun x.py, bash run.sh; a file of that name comes first."""

import os
import signal
import subprocess
import sys

import pytest

from virtualgpu.run import cli


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_shell_script_whose_lines_start_python(run, tmp_path):
    code = "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda').device)"
    (tmp_path / "run.sh").write_text(f'"{sys.executable}" -c "{code}"\necho "$@"\nexit 5\n')
    found = run("--gpus", 3, "--quiet", "bash", tmp_path / "run.sh", "--dry", "two words")
    assert (found.returncode, found.stdout, found.stderr) == (5, "3 cuda:0\n--dry two words\n", "")


def test_signals_reach_a_command(clean_environ):
    """One sent to the runner alone is passed on, once; one that ends the command ends the runner."""
    loop = "while :; do sleep 0.05; done"
    for traps, sent, status in (("trap 'echo INT; exit 3' INT;", signal.SIGINT, 3), ("", signal.SIGTERM, -15)):
        command = [sys.executable, "-m", "virtualgpu", "--quiet", "bash", "-c", f"{traps} echo ready; {loop}"]
        runner = subprocess.Popen(command, env=clean_environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert runner.stdout.readline() == "ready\n"
            runner.send_signal(sent)
            assert runner.wait(timeout=60) == status
            assert runner.stdout.read() == ("INT\n" if traps else "")
        finally:
            if runner.poll() is None:
                os.killpg(runner.pid, signal.SIGKILL)
            runner.communicate()


def test_which_program_is_started(tmp_path, monkeypatch):
    """A script goes to this Python, with its flags; what is a program of its own is started as it is."""
    monkeypatch.chdir(tmp_path)
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "-m", "virtualgpu", "x"])
    python = [sys.executable, "-u"]
    console = script(commands / "trainer", "#!/opt/some/python3.11\nprint(1)\n")
    shell = script(commands / "shelly", "#!/bin/sh /home/python/x\n")
    assert cli.command(["trainer", "fit", "--gpus", "2"]) == [*python, console, "fit", "--gpus", "2"]
    assert cli.command(["shelly", "x"]) == [shell, "x"]
    assert cli.command(["bash", "run.sh"])[0].endswith("/bash")
    assert cli.command(["-m", "trainer"]) == [*python, "-m", "trainer"]
    assert cli.command(["-"]) == [*python, "-"]
    (tmp_path / "shelly").mkdir()  # a folder without a program does not hide a command
    assert cli.command(["shelly"]) == [shell]
    (tmp_path / "shelly" / "__main__.py").write_text("")
    assert cli.command(["shelly"]) == [*python, "shelly"]
    spaced = script(
        commands / "spaced", "#!/bin/sh\n'''exec' \"/a b/python3\" \"$0\" \"$@\"\n' '''\n"
    )  # as pip writes it
    assert cli.command(["spaced", "x"]) == [*python, spaced, "x"]
    (tmp_path / "trainer").write_text("print(2)\n")
    assert cli.command(["trainer"]) == [*python, "trainer"]
    script(tmp_path / "x.py", "print(3)\n")  # executable, and without a first line that says by what
    assert cli.command(["./x.py", "1"]) == [*python, "./x.py", "1"]
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")  # not executable
    assert cli.command(["plain.sh"]) == [*python, "plain.sh"]
    assert cli.command([script(tmp_path / "run.sh", "#!/bin/sh\n")]) == [str(tmp_path / "run.sh")]


def test_torchrun_of_this_python_without_a_path(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    beside = os.path.join(os.path.dirname(sys.executable), "torchrun")
    if not os.path.exists(beside):
        pytest.skip("this Python has no torchrun beside it")
    assert cli.command(["torchrun", "x.py"]) == [sys.executable, beside, "x.py"]


def test_neither_a_file_nor_a_command(capsys):
    assert cli.main(["torchrn", "x.py"]) == 2
    assert capsys.readouterr().err == "python -m virtualgpu: 'torchrn' is neither a file here nor a command on PATH\n"


def test_what_a_program_gets_that_says_nothing(run):
    """Threads that wait sleep; Triton's kernels are interpreted; the user's word goes first."""
    code = "import os; print(*(os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'OMP_NUM_THREADS', 'TRITON_INTERPRET')))"
    ours = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    threads = ours.get("OMP_NUM_THREADS")
    assert run("--quiet", "-c", code).stdout == f"passive {threads} 1\n"
    theirs = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3", "TRITON_INTERPRET": "0"}
    assert run("--quiet", "-c", code, environ=theirs).stdout == "active 3 0\n"
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert "OMP_WAIT_POLICY" not in cli.defaults({name: "1"})
