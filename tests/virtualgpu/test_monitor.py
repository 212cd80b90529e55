"""The monitor over sources, healthy and broken: it never raises, never blocks, and leaves gaps where nothing was read."""

import math
import time

import pytest
import torch

from virtualgpu import Monitor
from virtualgpu.monitor import CPUSource, Reading, Source


class Scripted(Source):
    """A source that gives what it was told to, one list of readings a call; an exception is raised instead."""

    interval = 0.001

    def __init__(self, devices, readings):
        self.devices, self._readings, self.calls = devices, readings, 0

    def read(self):
        found = self._readings[min(self.calls, len(self._readings) - 1)]
        self.calls += 1
        if isinstance(found, Exception):
            raise found
        return found


def watch(source, steps, until):
    """Run a monitor over `source` for `steps` iterations, each of which lasts until `until(monitor, step)`."""
    with Monitor(source) as watched:
        for step in range(steps):
            deadline = time.monotonic() + 5
            while not until(watched, step):
                assert time.monotonic() < deadline, "the source was not read"
                time.sleep(0.001)
            watched.step()
    return watched


def test_each_reading_carries_its_iteration():
    source = Scripted(["cuda:0"], [[Reading(50.0)]])
    watched = watch(source, 4, lambda m, step: any(iteration == step for iteration, _ in m.samples))
    assert watched.utilization() == {"cuda:0": [50.0] * 4}
    assert watched.step_times == sorted(watched.step_times)


def test_an_iteration_takes_the_mean_of_its_readings():
    watched = Monitor(Scripted(["a", "b"], [[]]))
    watched.samples = [
        (0, [Reading(10, 5), Reading(0)]),
        (0, [Reading(30, 7), Reading(math.nan)]),
    ]
    watched.step_times = [0.3, 0.4]
    assert watched.utilization()["a"][0] == 20 and watched.computing()["a"][0] == 6
    assert watched.utilization()["b"][0] == 0 and math.isnan(watched.computing()["b"][0])
    assert math.isnan(watched.utilization()["a"][1]), "nothing was read in the second iteration"


def test_a_source_that_fails_leaves_a_gap_and_recovers():
    source = Scripted(["cuda:0"], [[Reading(1.0)], OSError("driver gone"), [Reading(3.0)]])
    watched = watch(source, 3, lambda m, step: len(m.samples) > step)
    values = [readings[0].utilization for _, readings in watched.samples[:3]]
    assert values[0] == 1.0 and math.isnan(values[1]) and values[2] == 3.0


def test_the_thread_ends_with_the_block_also_when_it_raises():
    with pytest.raises(ZeroDivisionError), Monitor(CPUSource()) as watched:
        1 / 0  # noqa: B018
    assert not watched._thread.is_alive()


def test_a_source_that_never_answers_is_reported():
    with pytest.warns(UserWarning, match="could not read cuda:0: its plots are empty"):
        watch(Scripted(["cuda:0"], [OSError("driver gone")]), 1, lambda m, step: m.samples)


def test_the_monitor_tells_what_tensors_hold(gpu):
    kept = []
    with Monitor() as monitor:
        for _ in range(3):
            kept.append(torch.zeros(1024, 1024, device=gpu))
            monitor.step()
    assert monitor.allocated() == {"cuda:0": [4 << 20, 8 << 20, 12 << 20]}
