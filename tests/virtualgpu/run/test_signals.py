"""How runs end: status and signals are the program's, each signal once; whoever is killed, no process is left, and no folder for long."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import family, runs, wait_until
from virtualgpu import scratch
from virtualgpu.run import trials
from virtualgpu.run.trials import Programs, ended_by_sigterm

ROOT = Path(__file__).resolve().parents[3]
tells_environments = pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' environments")

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


def test_each_signal_comes_once(start):
    runner = start("--quiet", "-c", WAITS)
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


def test_what_was_ignored_stays_ignored(start):
    """As nohup has it."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)"
    runner = start("-c", code, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)
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


@pytest.mark.parametrize(
    ("number", "kill"), [(signal.SIGINT, "os.killpg(0, {})"), (signal.SIGTERM, "os.kill(os.getpid(), {})")]
)
def test_a_signal_before_there_is_a_program(clean_environ, tmp_path, number, kill):
    """It reaches the program as soon as that is there."""
    code = EARLY.replace("KILL", kill.format(int(number)))
    options = {"start_new_session": True, "preexec_fn": lambda: signal.signal(number, signal.SIG_DFL) and None}
    environ = {**clean_environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, **options)
    assert (ended.returncode, ended.stdout) == (-number, "")
    assert "virtualgpu" not in ended.stderr  # a KeyboardInterrupt is the program's
    wait_until(lambda: not os.listdir(tmp_path))


# -- What the program started

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


@tells_environments
@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_killed_runner_takes_the_ranks_along(start, tmp_path, kill):
    """torchrun's ranks have sessions of their own, and their own children. A kernel's restart kills all of its group."""
    runner = start("--quiet", "-c", FAMILY)
    mine = {"name": "TMPDIR", "value": str(tmp_path)}
    assert runner.stdout.readline() == "ready\n"
    wait_until(lambda: len(family(**mine)) == 8)  # runner, its two watchers, program, two ranks, a leaf of each
    kill(runner.pid, signal.SIGKILL)
    wait_until(lambda: not family(**mine) and not os.listdir(tmp_path))


@tells_environments
@pytest.mark.parametrize(("end", "left"), [("killed", 0), (f"os._exit({128 + signal.SIGKILL})", 0), ("os._exit(0)", 4)])
def test_a_signal_that_ends_the_program_takes_its_ranks_along(start, tmp_path, end, left):
    """A shell's status says of a signal, too. What a program leaves when it ends of itself goes on."""
    ends = f"import os; sys.stdin.read(1); {end}\nwhile True:"
    runner = start(
        "--quiet", "-c", FAMILY if end == "killed" else FAMILY.replace("while True:", ends), stdin=subprocess.PIPE
    )
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


# -- Programs that `fit` and `--explain` try

TRAINS = """
import torch
weight = torch.nn.Parameter(torch.ones(9, device="cuda"))
optimizer = torch.optim.SGD([weight])
while True:
    weight.sum().backward()
    optimizer.step()
"""


@tells_environments
@pytest.mark.parametrize(
    ("search", "number", "status"),
    [
        (["fit", "--gpus", "1,2"], signal.SIGKILL, -9),
        (["fit", "--gpus", "1,2"], signal.SIGTERM, 143),
        (["--explain", "--gpus", "1"], signal.SIGINT, 130),
    ],
    ids=str,
)
def test_a_signal_leaves_nothing_that_was_tried(start, tmp_path, search, number, status):
    path = tmp_path / "train it.py"
    path.write_text(TRAINS)
    mine = {"name": "TMPDIR", "value": str(tmp_path)}
    searching = start(*search, "--steps", "0", str(path), stderr=subprocess.PIPE)
    wait_until(lambda: runs(str(path), **mine), 120)
    searching.send_signal(number)
    printed, errors = searching.communicate(timeout=60)
    assert (searching.returncode, printed) == (status, ""), errors  # no trial had ended
    assert ("Interrupted: no program is left." in errors) == (number == signal.SIGINT), errors
    wait_until(lambda: not family(**mine), 10)
    assert path.exists()


@pytest.mark.parametrize("module", ["virtualgpu.run.launcher", "virtualgpu.run.fit.search"])
def test_ctrl_c_while_the_runner_loads_leaves_no_traceback(module):
    """A module that is interrupted as it is imported, as Ctrl-C a moment after the start would."""
    code = f"""if True:
        import runpy, sys
        class Finder:
            def find_spec(name, path, target=None):
                if name == "{module}":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Finder)
        sys.argv[1:] = ["fit", "train.py"]
        runpy.run_module("virtualgpu", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX threads")
def test_a_signal_that_another_thread_was_given_is_heard():
    """The system may give it to any; Python handles it in the main thread, which then must not sleep until a program ends."""
    heard, late = threading.Event(), []

    def work(_):
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        late.append(not heard.wait(20))

    class Ended(Programs):
        def end(self):
            heard.set()
            super().end()

    with pytest.raises(SystemExit) as error, ended_by_sigterm(), Ended() as programs:
        programs.side_by_side(work, [0], 1)
    assert error.value.code == 143 and late == [False]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_interrupt_in_the_midst_of_a_start_leaves_no_program(monkeypatch, ctrl_c):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(command, **options)
            if command[-1] == "leaf":
                started.append(self)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)

    monkeypatch.setattr(trials.subprocess, "Popen", Popen)
    leaf = [sys.executable, "-S", "-c", "import time; time.sleep(300)", "leaf"]
    with pytest.raises(KeyboardInterrupt), Programs() as programs:
        programs.run(leaf, dict(os.environ), subprocess.DEVNULL)
    wait_until(lambda: started[0].poll() is not None)


# -- What killed processes leave in the folder for temporary files goes with the next one that needs a folder

MAKER = """
import os, signal, sys, tempfile
from virtualgpu import scratch

path = scratch.folder()
open(os.path.join(path, "1.ledger"), "w").close()
number, page = tempfile.mkstemp(prefix=scratch.PREFIX, suffix=".moments")
scratch.hold(number)
print(path, page, sep="\\t", flush=True)
if sys.argv[1] == "ends":
    scratch.remove(path), os.unlink(page)
else:
    signal.pause()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def maker(how: str) -> tuple[subprocess.Popen, list[str]]:
    command = [sys.executable, "-c", MAKER, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return process, process.stdout.readline().strip().split("\t")


def make_old(*paths) -> None:
    for path in paths:
        os.utime(path, (0, 0))


def test_what_a_killed_process_left_goes_with_the_next(temporary):
    """Neither what is held, young or another program's, nor where a link leads; who ends by itself leaves nothing."""
    ends, gone = maker("ends")
    assert ends.wait() == 0 and len(gone) == 2 and os.listdir(temporary) == []
    alive, held = maker("waits")
    killed, left = maker("waits")
    killed.kill()
    killed.communicate()
    young, others, mine = (temporary / name for name in ("virtualgpu-young", "virtual-reality", "mine"))
    for folder in (young, others, mine):
        folder.mkdir()
    (mine / "thesis.tex").write_text("all of it")
    link = temporary / "virtualgpu-link"
    link.symlink_to(mine)
    os.utime(link, (0, 0), follow_symlinks=False)
    make_old(*held, *left, others)
    try:
        made = scratch.folder()
        assert not any(map(os.path.exists, left))
        assert all(map(os.path.exists, [*held, young, others, made, mine / "thesis.tex"]))
    finally:
        alive.kill()
        alive.communicate()
    scratch.remove(made)
    assert not os.path.exists(made)
