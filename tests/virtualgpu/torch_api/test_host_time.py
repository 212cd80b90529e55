"""Python's time: time.sleep passes on the simulated clock, in the main thread and by a line of the program; what a stopwatch reads is chosen."""

import _thread
import io
import os
import pickle
import queue
import sys
import sysconfig
import threading
import time
import timeit
import warnings
from time import perf_counter, sleep

import pytest
import torch
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as benchmark_timer

import virtualgpu
from virtualgpu import session

PAUSE = 0.02  # seconds
READ = [time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns, time.monotonic_ns]


def between_events(pause) -> float:
    """Simulated seconds from one event to the next, with the pause between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    pause()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def in_a_thread():
    thread = threading.Thread(target=time.sleep, args=(PAUSE,))
    thread.start()
    thread.join()


def in_library(code: str):
    """What `answer` is after this code, of a file of a library."""
    names: dict = {"__name__": "library", "time": time}
    exec(compile(code, os.path.join(sysconfig.get_path("purelib"), "library.py"), "exec"), names)
    return names["answer"]


@pytest.mark.parametrize(
    ("pause", "passes"),
    [
        (lambda: time.sleep(PAUSE), PAUSE),
        (lambda: [time.sleep(PAUSE / 2) for _ in range(2)], PAUSE),
        (in_a_thread, 0),
        (lambda: in_library(f"answer = time.sleep({PAUSE})"), 0),
    ],
    ids=["once", "twice", "in a thread", "in a library"],
)
def test_a_pause_of_the_program_passes(gpus, pause, passes):
    assert between_events(pause) == pytest.approx(passes, abs=1e-4)
    with virtualgpu.dry_run(1):
        assert between_events(pause) == pytest.approx(passes, abs=1e-4)


def test_a_gpu_that_works_meanwhile_is_not_later_for_it(gpus):
    x = torch.ones(2**10, 2**10, device="cuda")
    for cycles in (1_000, 400_000_000):  # shorter than the pause, and longer, without a processor's work for it
        start = gpus.clock.host
        x @ x
        torch.cuda._sleep(cycles)
        launched = gpus.clock.host
        busy = gpus.clock.ready(0) - start
        time.sleep(PAUSE)
        torch.cuda.synchronize()
        assert (busy > 2 * PAUSE) == (cycles > 1_000)
        assert gpus.clock.host - start == pytest.approx(max(busy, launched - start + PAUSE), abs=1e-4)


def test_sleep_is_pythons_own_afterwards_and_says_what_python_says(gpus):
    with pytest.raises(ValueError, match="must be non-negative"):
        time.sleep(-1)
    with pytest.raises(TypeError):
        time.sleep("a while")
    virtualgpu.reset()
    assert time.sleep is sleep


# -- what a stopwatch reads


@pytest.fixture
def simulated(gpus, monkeypatch):
    """Two T4s, whose time the program is told, and which has begun."""
    monkeypatch.setattr(session, "_timers", session._timers)
    virtualgpu.timers("simulated")
    torch.ones(1, device="cuda")
    time.perf_counter()
    return gpus


def works(seconds: float) -> float:
    """A processor works so long, outside of PyTorch. Returns how long."""
    begin = time.thread_time()
    while time.thread_time() < begin + seconds:
        pass
    return time.thread_time() - begin


def trains(steps: int = 3) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 256, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", [function.__name__ for function in READ])
def test_a_stopwatch_reads_what_events_do(simulated, name):
    read, unit = getattr(time, name), 1e-9 if name.endswith("_ns") else 1.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = read()
    start.record()
    trains()
    end.record()
    torch.cuda.synchronize()
    assert (read() - before) * unit == pytest.approx(start.elapsed_time(end) / 1e3, rel=0.01)


def test_own_work_passes_for_events_too_and_in_a_step_only_between_operations(simulated):
    took = []
    watch = time.perf_counter()
    assert between_events(lambda: took.append(works(0.03))) == pytest.approx(took[0], rel=0.1)
    assert time.perf_counter() - watch == pytest.approx(took[0], rel=0.1)
    before = time.perf_counter()
    took = works(0.0005)  # too short between operations, but not from one reading to the next
    assert time.perf_counter() - before == pytest.approx(took, rel=0.5)


def test_work_on_the_cpu_passes_and_that_of_ours_does_not(simulated):
    x = torch.ones(700, 700)
    before, worked = time.perf_counter(), time.thread_time()
    for _ in range(4):
        x @ x
    worked = time.thread_time() - worked
    assert time.perf_counter() - before == pytest.approx(worked, rel=0.2)
    x = x.cuda()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(4):
        x @ x
    torch.cuda.synchronize()
    assert time.perf_counter() - before < 0.1 * worked


def test_a_gpu_works_beside_the_programs_own_work(simulated):
    x = torch.ones(2**10, 2**10, device="cuda")
    torch.cuda.synchronize()
    before = time.perf_counter()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    took = works(0.03)
    x + x
    assert time.perf_counter() - before == pytest.approx(took, rel=0.1)
    torch.cuda.synchronize()
    assert time.perf_counter() - before == pytest.approx(simulated.gpus[0].kernels.took(200_000_000), rel=0.1)


def test_libraries_limits_and_dates_keep_this_machines_time(simulated):
    torch.cuda._sleep(10**12)  # ten simulated minutes
    torch.cuda.synchronize()
    real = perf_counter.original if hasattr(perf_counter, "original") else perf_counter
    assert time.perf_counter() - real() > 300
    assert abs(in_library("answer = time.perf_counter()") - real()) < 1
    begin = real()
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=0.1)
    assert not threading.Event().wait(0.1)
    assert 0.2 <= real() - begin < 5


def test_who_asks_without_a_line_of_python_gets_this_machines_time(simulated, monkeypatch):
    """Ray's threads ask so; there an error is none's, and on Python 3.13 it ends the process."""
    errors, ended = [], threading.Semaphore(0)
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    for function, arguments in ((time.perf_counter, ()), (time.sleep, (0,)), (ended.release, ())):
        _thread.start_new_thread(function, arguments)
        time.sleep(0.05)
    assert ended.acquire(timeout=10) and not errors


def test_timeit_and_benchmark_and_bars_tell_simulated_time(simulated):
    x = torch.ones(512, 512, device="cuda")

    def multiplies():
        x @ x
        torch.cuda.synchronize()

    took = [between_events(multiplies) for _ in range(2)][1]
    assert timeit.timeit(multiplies, number=10) / 10 == pytest.approx(took, rel=0.2)
    assert timeit.Timer("multiplies()", globals=locals()).timeit(10) / 10 == pytest.approx(took, rel=0.2)
    # PyTorch 2.11 chooses its timer when it is imported: here without a GPU
    if benchmark_timer is not timeit.default_timer.original:
        assert Timer("multiplies()", globals=locals()).timeit(10).mean == pytest.approx(took, rel=0.2)
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=10, disable=False, file=io.StringIO()) as bar:
        for _ in range(10):
            multiplies()
            bar.update()
        assert bar.format_dict["elapsed"] == pytest.approx(10 * took, rel=0.3)


def test_a_thread_that_looks_on_is_never_behind_and_comes_to_its_end(simulated):
    seen = []

    def watch():
        begin = time.time()
        while time.time() < begin + 0.05:
            time.sleep(0.01)
        seen.append(time.time())

    before, host = time.time(), simulated.clock.host
    watcher = threading.Thread(target=watch)
    watcher.start()
    watcher.join()
    assert seen[0] >= before + 0.05
    assert simulated.clock.host - host < 0.01  # its sleep is no host's


def test_what_stands_in_passes_for_pythons_own(simulated):
    class Meter:
        clock = time.perf_counter

    assert Meter().clock() > 0  # no method, as a builtin is none
    assert pickle.loads(pickle.dumps(time.time)) is time.time
    assert time.perf_counter.__name__ == "perf_counter"
    assert timeit.default_timer is time.perf_counter
    virtualgpu.reset()
    assert (time.sleep, time.perf_counter) == (sleep, perf_counter)
    assert all(getattr(time, function.__name__) is function for function in READ)
    assert perf_counter in timeit.Timer.__init__.__defaults__


def test_the_time_goes_on_over_other_gpus(simulated):
    before = time.time()
    torch.cuda._sleep(10**11)
    torch.cuda.synchronize()
    later = time.time()
    virtualgpu.gpus(1, like="A100")
    torch.ones(1, device="cuda")
    assert before + 30 < later <= time.time()


def test_who_reads_it_around_synchronize_is_told_once_and_chooses(gpus, monkeypatch):
    def timed() -> float:
        begin = time.perf_counter()
        trains(1)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    monkeypatch.setattr(session, "_timers", "warn")
    gpus.read_timers("warn")
    with pytest.warns(UserWarning, match=r'perf_counter\(\) is this machine.*virtualgpu.timers\("simulated"\)') as told:
        timed()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timed()
        virtualgpu.timers("real")
        timed()
        begin = time.perf_counter()
        assert time.perf_counter() - begin < 1
    with pytest.raises(ValueError, match='choose "simulated" or "real"'):
        virtualgpu.timers("gpu")


def test_a_bar_is_told_nothing(gpus, monkeypatch):
    """Its rate is this machine's, but nobody has measured anything."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(session, "_timers", "told")
    gpus.read_timers("told")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in tqdm.tqdm(range(3), disable=False, file=io.StringIO(), mininterval=0):
            trains(1)
            torch.cuda.synchronize()
