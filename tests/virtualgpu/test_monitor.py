"""The monitor over sources, healthy and broken: it never raises, never blocks, and leaves gaps where nothing was read. And the sources,
which tell how busy devices are: virtual GPUs, NVML, the CPU; which of them is asked."""

import math
import time
from types import SimpleNamespace

import pynvml
import pytest
import torch

import virtualgpu
from tests.processes import wait_until
from virtualgpu import Monitor, monitor
from virtualgpu.monitor import CPUSource, NVMLSource, Reading, Source, VirtualSource, best_source


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
            wait_until(lambda step=step: until(watched, step), 5)
            watched.step()
    return watched


def test_each_reading_carries_its_iteration():
    source = Scripted(["cuda:0"], [[Reading(50.0)]])
    watched = watch(source, 4, lambda m, step: any(iteration == step for iteration, _ in m.samples))
    assert watched.utilization() == {"cuda:0": [50.0] * 4}
    assert watched.step_times == sorted(watched.step_times)


def test_an_iteration_takes_the_mean_of_its_readings():
    watched = Monitor(Scripted(["a", "b"], [[]]))
    watched.samples = [(0, [Reading(10, 5), Reading(0)]), (0, [Reading(30, 7), Reading(math.nan)])]
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
    with Monitor() as watched:
        for _ in range(3):
            kept.append(torch.zeros(1024, 1024, device=gpu))
            watched.step()
    assert watched.allocated() == {"cuda:0": [4 << 20, 8 << 20, 12 << 20]}


# -- the sources


@pytest.fixture
def nvml(monkeypatch):
    """NVML with three GPUs, of which the last one reports no utilization."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def utilization(handle):
        if handle == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=10 * (handle + 1))

    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}",
        "nvmlDeviceGetUtilizationRates": utilization,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)


def test_nvml_reads_three_gpus_and_a_gap_where_one_reports_nothing(nvml):
    source = NVMLSource()
    first, second, third = source.read()
    assert source.devices == ["cuda:0", "cuda:1", "cuda:2"]
    assert (first, second) == (Reading(10), Reading(20)) and math.isnan(third.utilization)


def test_nvml_follows_cuda_visible_devices(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [reading.utilization for reading in NVMLSource().read()] == [20, 10]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        NVMLSource()


def test_without_a_driver_the_cpu_is_read_but_a_fault_of_ours_is_raised(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def broken():
        raise RuntimeError("a bug")

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(RuntimeError, match="NVML"):
        NVMLSource()
    assert isinstance(best_source(), CPUSource)
    monkeypatch.setattr(monitor, "NVMLSource", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        best_source()


def test_virtual_gpus_that_are_on_come_first(gpu, nvml):
    source = best_source()
    assert isinstance(source, VirtualSource) and source.devices == ["cuda:0"] and source.origin == "simulated"
    virtualgpu.reset()
    assert isinstance(best_source(), NVMLSource)


def test_the_cpu_source_sees_this_process_work():
    source = CPUSource()
    end = time.process_time() + 0.2  # seconds of work, however long they take
    while time.process_time() < end:
        sum(range(1000))
    (reading,) = source.read()
    assert 0 < reading.utilization <= 110
