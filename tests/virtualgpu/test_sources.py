"""What tells how busy devices are: virtual GPUs, NVML, the CPU; and which of them is asked."""

import math
import time
from types import SimpleNamespace

import pynvml
import pytest

import virtualgpu
from virtualgpu import monitor
from virtualgpu.monitor import CPUSource, NVMLSource, Reading, VirtualSource, best_source


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


def test_without_a_driver_nvml_says_so(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(RuntimeError, match="NVML"):
        NVMLSource()
    assert isinstance(best_source(), CPUSource)


def test_a_fault_of_ours_is_not_taken_for_a_missing_source(monkeypatch):
    def broken():
        raise RuntimeError("a bug")

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
