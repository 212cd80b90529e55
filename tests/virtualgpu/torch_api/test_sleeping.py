"""time.sleep passes on the simulated clock: in the main thread, by a line of the program."""

import os
import sysconfig
import threading
import time
from time import sleep

import pytest
import torch

import virtualgpu

PAUSE = 0.02  # seconds


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


def in_a_library():
    source = f"import time\ndef pause():\n    time.sleep({PAUSE})\n"
    names: dict = {"__name__": "library"}
    exec(compile(source, os.path.join(sysconfig.get_path("purelib"), "library.py"), "exec"), names)
    names["pause"]()


@pytest.mark.parametrize(
    ("pause", "passes"),
    [
        (lambda: time.sleep(PAUSE), PAUSE),
        (lambda: [time.sleep(PAUSE / 2) for _ in range(2)], PAUSE),
        (in_a_thread, 0),
        (in_a_library, 0),
    ],
    ids=["once", "twice", "in a thread", "in a library"],
)
def test_a_pause_of_the_program_passes(gpus, pause, passes):
    assert between_events(pause) == pytest.approx(passes, abs=1e-4)


def test_a_gpu_that_works_meanwhile_is_not_later_for_it(gpus):
    x = torch.ones(2**10, 2**10, device="cuda")
    for cycles in (1_000, 400_000_000):  # shorter than the pause, and longer, without a processor's work for it
        start = virtualgpu.machine().clock.host
        x @ x
        torch.cuda._sleep(cycles)
        launched = virtualgpu.machine().clock.host
        busy = virtualgpu.machine().clock.ready(0) - start
        time.sleep(PAUSE)
        torch.cuda.synchronize()
        took = virtualgpu.machine().clock.host - start
        assert (busy > 2 * PAUSE) == (cycles > 1_000)
        assert took == pytest.approx(max(busy, launched - start + PAUSE), abs=1e-4)


def test_sleep_is_pythons_own_afterwards_and_says_what_python_says(gpus):
    with pytest.raises(ValueError, match="must be non-negative"):
        time.sleep(-1)
    with pytest.raises(TypeError):
        time.sleep("a while")
    virtualgpu.reset()
    assert time.sleep is sleep


def test_a_pause_passes_in_a_dry_run():
    with virtualgpu.dry_run(1):
        assert between_events(lambda: time.sleep(PAUSE)) == pytest.approx(PAUSE, abs=1e-4)
