"""Exit status, stdin and signals are the program's, each signal once."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest

from tests.processes import family, wait_until

# Waits for signals; after each, long enough that a second one of the same would have come.
WAITS = """
import os, signal
waited = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
signal.signal(signal.SIGALRM, lambda *_: (print("too late", flush=True), os._exit(1)))
signal.alarm(60)
print("ready", os.getpid(), os.environ["PATH"].split(":")[0], flush=True)
while True:
    got = [signal.sigwaitinfo(waited).si_signo]
    while (more := signal.sigtimedwait(waited, 0.5)) is not None:
        got.append(more.si_signo)
    print(*[signal.Signals(number).name for number in got], flush=True)
"""


@pytest.fixture
def start(clean_environ, tmp_path):
    """start(code): the runner with that program, in a process group of its own."""
    started = []

    def start(code, **options):
        command = [sys.executable, "-m", "virtualgpu", "--quiet", "-c", code]
        options = {"stdout": subprocess.PIPE, "start_new_session": True, **options}
        environ = {**clean_environ, "TMPDIR": str(tmp_path)}
        started.append(subprocess.Popen(command, env=environ, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_status_and_stdin_are_the_programs(run):
    found = run(
        "-c", "import sys; print(sys.stdin.read()[::-1], sys.argv); sys.exit(7)", "--gpus", input="abc", anew=True
    )
    assert (found.returncode, found.stdout) == (7, "cba ['-c', '--gpus']\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_that_ends_the_program_ends_the_runner(run, number):
    found = run("--quiet", "-c", f"import os; os.kill(os.getpid(), {int(number)})", anew=True)
    assert found.returncode == -number


def test_each_signal_comes_once(start):
    runner = start(WAITS)
    program = int(runner.stdout.readline().split()[1])
    os.killpg(runner.pid, signal.SIGTERM)  # the program has it already
    assert runner.stdout.readline() == "SIGTERM\n"
    runner.send_signal(signal.SIGTERM)  # the runner alone: passed on
    assert runner.stdout.readline() == "SIGTERM\n"
    runner.send_signal(signal.SIGINT)
    assert runner.stdout.readline() == "SIGINT\n"
    for child in psutil.Process(runner.pid).children():
        if child.pid != program:
            child.kill()  # nobody that watches is missed
    runner.send_signal(signal.SIGUSR1)
    assert runner.stdout.readline() == "SIGUSR1\n"
    os.kill(program, signal.SIGKILL)
    assert runner.wait() == -signal.SIGKILL


def test_ctrl_c_in_a_terminal_comes_once(start):
    ours, theirs = pty.openpty()
    start(WAITS, stdin=theirs, stdout=theirs, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None)
    os.close(theirs)
    with open(ours, buffering=1) as terminal:
        assert terminal.readline().startswith("ready")
        os.write(ours, b"\x03")
        assert terminal.readline().strip() == "^CSIGINT"


def test_a_keyboard_interrupt_is_the_programs_end(start):
    runner = start("print('ready', flush=True); import signal; signal.pause()", stderr=subprocess.PIPE)
    assert runner.stdout.readline() == "ready\n"
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.communicate()[1].count("KeyboardInterrupt") == 1
    assert runner.returncode == -signal.SIGINT


def test_a_killed_runner_takes_the_program_along(start):
    runner = start(WAITS)
    _, program, tools = runner.stdout.readline().split()
    folder = Path(tools).parent
    assert folder.is_dir()
    runner.kill()
    assert runner.stdout.read() == ""  # until the last of them has closed it: the program
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int(program), 0)
    while folder.exists():  # the supervisor is about to remove it
        pass


def test_what_was_ignored_stays_ignored(start):
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)"
    runner = start(code, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)
    assert runner.stdout.readline() == "True\n"


EARLY = """
import os, signal, subprocess, sys

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        KILL
        super().__init__(*arguments, **options)

subprocess.Popen = Popen
from virtualgpu.run import cli
sys.exit(cli.main(["--quiet", "-c", "import signal; signal.alarm(10); signal.pause()"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kill", ["os.kill(os.getpid(), {})", "os.killpg(0, {})"], ids=["runner", "group"])
def test_a_signal_before_there_is_a_program(clean_environ, tmp_path, number, kill):
    """It reaches the program as soon as that is there."""
    code = EARLY.replace("KILL", kill.format(int(number)))
    options = {"start_new_session": True, "preexec_fn": lambda: signal.signal(number, signal.SIG_DFL) and None}
    environ = {**clean_environ, "TMPDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, **options)
    assert (found.returncode, found.stdout) == (-number, "")
    assert "virtualgpu" not in found.stderr  # a KeyboardInterrupt is the program's
    wait_until(lambda: not os.listdir(tmp_path))


def test_interrupted_before_anything_is_started(clean_environ):
    code = """if True:
        import os, signal, sys
        from virtualgpu.run import cli
        def find(*arguments):
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.find_cards = find
        sys.exit(cli.main(["-c", ""]))"""
    found = subprocess.run([sys.executable, "-c", code], env=clean_environ, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (-signal.SIGINT, "")


FAMILY = """
import subprocess, sys, time
LEAF = "import time; time.sleep(300)"
RANK = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {LEAF!r}])"
ranks = [subprocess.Popen([sys.executable, "-S", "-c", RANK], start_new_session=own) for own in (False, True)]
print("ready", flush=True)
while True:
    for at, rank in enumerate(ranks):
        if rank.poll() is not None:  # as torchrun does
            ranks[at] = subprocess.Popen([sys.executable, "-S", "-c", RANK], start_new_session=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' environments")
@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_killed_runner_takes_the_ranks_along(start, tmp_path, kill):
    """torchrun's ranks have sessions of their own, and their own children. A kernel's restart kills all of its group."""
    runner = start(FAMILY)
    mine = {"name": "TMPDIR", "value": str(tmp_path)}
    assert runner.stdout.readline() == "ready\n"
    wait_until(lambda: len(family(**mine)) == 8)  # runner, its two watchers, program, two ranks, a leaf of each
    kill(runner.pid, signal.SIGKILL)
    wait_until(lambda: not family(**mine) and not os.listdir(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' environments")
@pytest.mark.parametrize(("end", "left"), [("killed", 0), (f"os._exit({128 + signal.SIGKILL})", 0), ("os._exit(0)", 4)])
def test_a_signal_that_ends_the_program_takes_its_ranks_along(start, tmp_path, end, left):
    """A shell's status says of a signal, too. What a program leaves when it ends of itself goes on."""
    family_until = (
        FAMILY
        if end == "killed"
        else FAMILY.replace("while True:", f"import os; sys.stdin.read(1); {end}\nwhile True:")
    )
    runner = start(family_until, stdin=subprocess.PIPE)
    mine = {"name": "TMPDIR", "value": str(tmp_path)}
    assert runner.stdout.readline() == "ready\n"
    wait_until(lambda: len(family(**mine)) == 8)
    program = max(psutil.Process(runner.pid).children(), key=lambda child: len(child.children()))
    program.kill() if end == "killed" else runner.stdin.write("x")
    runner.stdin.flush()
    runner.wait()
    wait_until(lambda: len(family(**mine)) == left)
    for process in family(**mine):
        process.kill()
