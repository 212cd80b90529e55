"""Several processes from a notebook: results and lines in rank order, the right rank blamed, nobody left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import forkserver

import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
from helpers import launch as by_name
from helpers.launch import WorkerError, launch
from tests.processes import ranks


@pytest.fixture(autouse=True)
def nobody_left():
    yield
    nobody(5)


def nobody(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def add_ranks(extra, scale=1):
    total = torch.ones(1) * (dist.get_rank() + extra)
    dist.all_reduce(total)
    print("sum", total.item())
    print("threads", torch.get_num_threads())
    return scale * dist.get_rank()


def crash(bad, how):
    if dist.get_rank() == bad:
        print("about to fail")
        if how == "raise":
            raise ValueError(f"rank {bad} has had enough")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(4)
    dist.all_reduce(torch.ones(1))
    return "survived"


def test_results_and_lines_in_rank_order(capsys):
    assert by_name is launch is helpers.launch  # the function, though a module has its name
    assert launch(add_ranks, 3, scale=10) == [0, 10]
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {r}] {line}" for r in (0, 1) for line in ("sum 7.0", "threads 1")
    ]


def test_functions_that_no_module_has(capsys):
    """A closure and a lambda, as a notebook's cell has them, and more ranks than cores."""
    offset = torch.arange(3)

    def worker():
        return offset + dist.get_rank(), os.environ["RANK"], os.environ["WORLD_SIZE"]

    found = launch(worker, nprocs=4)
    assert [tensor.tolist() for tensor, _, _ in found] == [[r, r + 1, r + 2] for r in range(4)]
    assert [(rank, size) for _, rank, size in found] == [(str(r), "4") for r in range(4)]
    assert launch(lambda: dist.get_world_size(), nprocs=1) == [1]


def test_large_results_come_back():
    assert [t.sum().item() for t in launch(lambda: torch.ones(5_000_000))] == [5e6, 5e6]


def test_after_a_training_in_the_parent():
    """A forked process would hang in OpenMP."""
    model = torch.nn.Linear(200, 200)
    model(torch.randn(500, 200)).sum().backward()

    def worker():
        model(torch.randn(500, 200)).sum().backward()
        return True

    assert launch(worker) == [True, True]


def test_twenty_launches_name_the_right_rank_each_time(capsys):
    for turn in range(20):
        bad, how = turn % 3, ("raise", "kill", "exit", "raise", "sys.exit")[turn % 5]
        with pytest.raises(WorkerError) as caught:
            launch(crash, bad, how, nprocs=3)
        assert caught.value.rank == bad, (turn, how, str(caught.value))
        said = {
            "raise": f"rank {bad} failed first:\nTraceback",
            "kill": f"rank {bad} was killed by SIGKILL",
            "exit": f"rank {bad} exited with status 3 before it was done",
            "sys.exit": f"rank {bad} failed first:\nSystemExit: 4",
        }[how]
        assert str(caught.value).startswith(said)
        if how == "raise":
            assert str(caught.value).endswith(f"ValueError: rank {bad} has had enough")
            assert "helpers/launch.py" not in str(caught.value)  # the traceback begins in the reader's function
        assert ranks() == []
    assert "[rank 0] about to fail" in capsys.readouterr().out


def test_a_rank_that_hangs_ends_at_the_time_limit():
    def waits_for_nobody():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)
        else:
            time.sleep(60)

    with pytest.raises(WorkerError) as caught:
        launch(waits_for_nobody, timeout=3)
    assert caught.value.rank is None
    first, *places = str(caught.value).splitlines()
    assert first == "not done after 3 s (the timeout). Where each rank stood:"
    assert [place.strip() for place in places] == caught.value.places
    zero, one = caught.value.places
    assert "rank 0 stands in line" in zero and zero.endswith("in waits_for_nobody, which waits in recv")
    assert "rank 1 stands in line" in one and one.endswith("in waits_for_nobody")


def test_an_interrupted_cell_leaves_no_process():
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without one
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(lambda: time.sleep(60))
    finally:
        signal.signal(signal.SIGINT, before)
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
    nobody(5)
    assert "Traceback" not in capfd.readouterr().err
    del caught  # until here it kept the frames of launch, as a notebook does


SCRIPT = """
    import os, time, torch.distributed as dist
    from helpers import launch

    def worker(path):
        with open(f"{path}{dist.get_rank()}", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(SECONDS)
        return dist.get_rank()

    print(launch(worker, PATH))
"""


def script(tmp_path, seconds):
    source = textwrap.dedent(SCRIPT).replace("SECONDS", str(seconds)).replace("PATH", repr(str(tmp_path / "pid")))
    (tmp_path / "script.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.getcwd(),
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def test_from_a_script_without_a_guard(tmp_path):
    """No `if __name__ == "__main__"` needed: the script is not run again in each process."""
    out, _ = script(tmp_path, 0).communicate(timeout=60)
    assert out == "[0, 1]\n"


def test_a_dying_kernel_takes_its_workers_along(tmp_path):
    with script(tmp_path, 60) as parent:
        files = [tmp_path / f"pid{r}" for r in range(2)]
        deadline = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [int(f.read_text()) for f in files]
        parent.kill()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("nprocs", [0, -1, 1.5, "2", True, None])
def test_impossible_numbers_of_processes(nprocs):
    with pytest.raises(ValueError, match="ask for one process or more"):
        launch(add_ranks, 1, nprocs=nprocs)


def test_what_cannot_travel():
    with pytest.raises(TypeError, match="pickle"):
        launch(lambda lock: None, threading.Lock())
    with pytest.raises(WorkerError, match="pickle") as caught:
        launch(lambda: threading.Lock())
    assert caught.value.rank in (0, 1)


def load_with_workers(fail=False):
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(6), batch_size=2, num_workers=2))
    first = next(batches).tolist()
    if fail:
        time.sleep(60)
    return first + [n for batch in batches for n in batch.tolist()]


def test_a_rank_may_have_a_loader_with_workers():
    assert launch(load_with_workers) == [list(range(6))] * 2


def test_a_loaders_workers_go_with_their_rank():
    with pytest.raises(WorkerError, match="not done after 4 s"):
        launch(load_with_workers, fail=True, timeout=4)
    assert ranks() == []


def one_leaves_early():
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), src=0)


def test_a_rank_that_is_done_says_so():
    with pytest.raises(
        WorkerError, match=r"rank 0 is done, and waits for the others\n  rank 1 stands in line \d+, in one_"
    ):
        launch(one_leaves_early, timeout=3)
