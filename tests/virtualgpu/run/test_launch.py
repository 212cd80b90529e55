"""Several processes from a notebook: results in rank order, the right rank blamed, nobody left behind. On GPUs: tests/virtualgpu/distributed."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from multiprocessing import forkserver, util
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import virtualgpu
from tests.processes import alive, listening, ranks, wait_until
from virtualgpu import scratch
from virtualgpu.run.ranks import WorkerError, launch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nobody_left():
    yield
    wait_until(lambda: not ranks(), 5)


def add_ranks(extra, scale=1):
    total = torch.ones(1) * (dist.get_rank() + extra)
    dist.all_reduce(total)
    print("sum", total.item())
    print("threads", torch.get_num_threads())
    return scale * dist.get_rank()


def test_results_and_lines_in_rank_order(capsys):
    assert launch is virtualgpu.launch
    assert launch(add_ranks, 3, scale=10) == [0, 10]
    said = [f"[rank {r}] {line}" for r in (0, 1) for line in ("sum 7.0", "threads 1")]
    assert capsys.readouterr().out.splitlines() == said


def test_functions_that_no_module_has_and_more_ranks_than_cores():
    """A closure, as a notebook's cell has them. What it trained before is no matter: a forked process would hang in OpenMP."""
    model = torch.nn.Linear(200, 200)
    model(torch.randn(500, 200)).sum().backward()

    def worker():
        model(torch.randn(500, 200)).sum().backward()
        return dist.get_rank(), os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_world_size()

    assert launch(worker, nprocs=4) == [(r, str(r), "4", 4) for r in range(4)]


def test_large_results_come_back():
    assert [t.sum().item() for t in launch(lambda: torch.ones(5_000_000))] == [5e6, 5e6]


def test_nobody_else_is_let_in():
    """Read on rank 0, of the notebook and all of its processes: the store's socket is the launcher's."""
    notebook = os.getpid()

    def heard():
        dist.barrier()
        return {address for address, _ in listening(psutil.Process(notebook))}

    assert launch(heard, nprocs=2)[0] == {"127.0.0.1"}


def test_a_ranks_collections_leave_pytorchs_objects_alone():
    def leave_a_cycle():
        cycle = torch.nn.Linear(1, 1)
        cycle.itself, gone = cycle, weakref.ref(cycle)
        del cycle
        gc.collect()
        return gone() is None, gc.get_freeze_count()

    [(gone, left_alone)] = launch(leave_a_cycle, nprocs=1)
    assert gone and left_alone > 100_000


# -- what is refused, and what the machine lacks


@pytest.mark.parametrize("options, words", [
    *[({"nprocs": nprocs}, "ask for one process or more") for nprocs in (0, -1, 1.5, "2", True, None)],
    *[({"timeout": limit}, f"timeout={limit!r}: say after how many seconds") for limit in (None, float("inf"), float("nan"), "5", True, 0, -1)],
])  # fmt: skip
def test_impossible_numbers(options, words):
    with pytest.raises(ValueError, match=words):
        launch(add_ranks, 1, **options)


def test_what_cannot_travel(monkeypatch):
    with pytest.raises(TypeError, match="pickle"):
        launch(lambda lock: None, threading.Lock())
    with pytest.raises(WorkerError, match="pickle") as caught:
        launch(lambda: threading.Lock())
    assert caught.value.rank in (0, 1)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        launch(add_ranks, 1)


def test_too_few_open_files(open_files_left):
    """Said before any process is there; multiprocessing's error says less, and gloo's wait for nobody."""
    open_files_left(20)
    with pytest.raises(OSError, match=r"2 processes need 32 more open files than there are: raise .* `ulimit -n 1024`"):
        launch(add_ranks, 1)


def test_a_network_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    words = r"GLOO_SOCKET_IFNAME=lo,nowhere0: .* no network interface 'nowhere0'; unset .* lo"
    with pytest.raises(ValueError, match=words):
        launch(add_ranks, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # of the ranks, whatever the first launch had
    assert launch(lambda: os.environ["GLOO_SOCKET_IFNAME"], nprocs=1) == ["lo"]


@pytest.mark.parametrize("whose, error", [
    ("virtualgpu.run.ranks.forkserver.store", RuntimeError("Resource temporarily unavailable")),
    ("virtualgpu.run.ranks.watch.Rank.start", BlockingIOError(11, "Resource temporarily unavailable")),
    ("virtualgpu.run.ranks.watch.Rank.start", EOFError("unexpected EOF")),
])  # fmt: skip
def test_no_process_more(monkeypatch, whose, error):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(whose, refuse)
    with pytest.raises(OSError, match=r"ranks could not be started .*`ulimit -u`, start fewer"):
        launch(add_ranks, 1)


def test_a_rank_that_may_start_no_thread():
    def full():
        os.write(2, b"RuntimeError: can't start new thread\n")
        os._exit(1)

    words = r"exited with status 1 .*`ulimit -u`.* Its last words:\nRuntimeError: can't start new thread"
    with pytest.raises(WorkerError, match=words):
        launch(full, nprocs=1)


# -- a rank that fails


def crash(bad, how):
    if dist.get_rank() == bad:
        print("about to fail")
        if how == "raise":
            raise ValueError(f"rank {bad} has had enough")
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(4)
        os.kill(os.getpid(), how)
    dist.all_reduce(torch.ones(1))
    return "survived"


REAL_TIME = getattr(signal, "SIGRTMIN", 0) + 5


@pytest.mark.parametrize("bad, how, said", [
    (0, "raise", "failed first:\nTraceback"),
    (1, signal.SIGKILL, "was killed by SIGKILL (out of memory on this machine, perhaps)"),
    (2, "exit", "exited with status 3 before it was done"),
    (1, "sys.exit", "failed first:\nSystemExit: 4"),
    (0, REAL_TIME, f"was killed by signal {REAL_TIME}"),
])  # fmt: skip
def test_the_rank_that_failed_is_named(capsys, bad, how, said):
    with pytest.raises(WorkerError) as caught:
        launch(crash, bad, how, nprocs=3)
    assert caught.value.rank == bad and ranks() == []
    assert str(caught.value).startswith(f"rank {bad} {said}")
    if how == "raise":
        assert str(caught.value).endswith(f"ValueError: rank {bad} has had enough")
        assert "ranks.py" not in str(caught.value)  # the traceback begins in the reader's function
    assert capsys.readouterr().out == f"[rank {bad}] about to fail\n"


def test_the_first_is_blamed_whatever_the_clock():
    """The time of day may be set back; a rank that failed later must not seem the first by it."""

    def worker():
        if dist.get_rank() == 0:
            time.time = lambda: 0.0
            time.sleep(1)
        raise ValueError

    with pytest.raises(WorkerError) as caught:
        launch(worker)
    assert caught.value.rank == 1


def test_a_forkserver_that_dies_is_started_anew(monkeypatch):
    """At the very moment when a rank is asked of it."""
    from multiprocessing.forkserver import _forkserver

    ensure_running, died = _forkserver.ensure_running, []

    def runs_no_longer():
        ensure_running()
        if not died:
            died.append(_forkserver._forkserver_pid)
            os.kill(died[0], signal.SIGKILL)

    monkeypatch.setattr(_forkserver, "ensure_running", runs_no_longer)
    assert launch(add_ranks, 1) == [0, 1]
    assert _forkserver._forkserver_pid not in died


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_what_ranks_are_forked_from_is_no_burden_to_a_kernel():
    """ipykernel waits until nobody else is in its group; and sockets of a killed one go with the next that needs a folder (scratch)."""
    from multiprocessing import resource_tracker

    launch(int, nprocs=1)
    for pid in (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
        assert os.getpgid(pid) == pid
    assert os.path.basename(util.get_temp_dir()).startswith(scratch.PREFIX)


# -- interrupted


def test_an_interrupted_cell_leaves_no_process(ctrl_c):
    interrupt = threading.Thread(
        target=lambda: (wait_until(lambda: len(ranks()) == 2), os.kill(os.getpid(), signal.SIGINT))
    )
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        launch(lambda: time.sleep(60))
    assert ranks() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted_while_a_rank_is_being_started(monkeypatch, capfd, rank):
    """The interrupt stays one, and the half-started process ends by itself, without a word."""
    launch(add_ranks, 1)
    read, calls = forkserver.read_signed, []

    def interrupted(descriptor):
        calls.append(read(descriptor))
        if len(calls) == rank + 1:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(forkserver, "read_signed", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(lambda: time.sleep(60))
    monkeypatch.undo()
    wait_until(lambda: not ranks(), 5)
    assert "Traceback" not in capfd.readouterr().err
    del caught  # until here it kept the frames of launch, as a notebook does


SCRIPT = """
    import os, time, torch.distributed as dist
    from virtualgpu import launch

    def worker(seconds):
        with open(f"{PATH}{dist.get_rank()}", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(seconds)
        return dist.get_rank()

    print(launch(worker, 0), flush=True)
    launch(worker, 60)
"""


def test_a_script_without_a_guard_and_its_workers_when_it_dies(tmp_path):
    """No `if __name__ == "__main__"` needed: the script is not run again in each process. Killed, as a kernel may be, it takes them
    along."""
    files = [tmp_path / f"pid{r}" for r in range(2)]
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("{PATH}", str(tmp_path / "pid")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "script.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        said = [parent.stdout.readline()]
        first = {file.read_text() for file in files}
        wait_until(lambda: all(file.read_text() not in {"", *first} for file in files), 60)
        pids = [int(file.read_text()) for file in files]
        parent.kill()
        said += parent.stdout.readlines()
    assert said == ["[0, 1]\n"]
    wait_until(lambda: not any(map(alive, pids)), 10)


# -- processes that ranks start


def load_with_workers(begun=None):
    """begun: a file that is made after the first batch, and then no batch follows."""
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(6), batch_size=2, num_workers=2))
    first = next(batches).tolist()
    if begun is not None:
        begun.touch()
        time.sleep(60)
    return first + [n for batch in batches for n in batch.tolist()]


def test_a_ranks_loader_may_have_workers_and_they_go_with_it(tmp_path):
    assert launch(load_with_workers) == [list(range(6))] * 2
    with pytest.raises(WorkerError, match="not done after 5 s"):
        launch(load_with_workers, tmp_path / "begun", timeout=5)
    assert (tmp_path / "begun").exists() and ranks() == []


DAEMON = "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); import time; time.sleep(300)"


def start_processes(path, killed):
    """A child, one in a session of its own, and a daemon as daemons are made; all of them would stay."""
    children = [subprocess.Popen(["sleep", "300"], start_new_session=own) for own in (False, not killed)]
    pids = [child.pid for child in children]
    if not killed:
        daemon = subprocess.Popen([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE)
        pids.append(int(daemon.stdout.readline()))
    path.write_text(" ".join(map(str, pids)))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a daemon cannot be told from others'")
@pytest.mark.parametrize("killed, number", [(False, 3), (True, 2)])
def test_what_a_rank_started_ends_with_it(tmp_path, killed, number):
    with pytest.raises(WorkerError, match="was killed by SIGKILL") if killed else contextlib.nullcontext():
        launch(start_processes, tmp_path / "pids", killed, nprocs=1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == number
    wait_until(lambda: not any(map(alive, pids)), 5)


def last_words():
    return Path("/proc/self/fd/2").read_text()


def test_without_a_network_nothing_is_said():
    """PyTorch's store logged, in red below the cell, that DNS has no name for an address."""
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this user may not leave the network")
    code = "from tests.virtualgpu.run import test_launch as it; print(it.launch(it.last_words))"
    ended = subprocess.run([*alone, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("['', '']\n", "")
