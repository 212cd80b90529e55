"""How busy devices are, as somebody sees it who asks again and again: virtual GPUs, real ones by their driver (NVML), or the CPU.

source = best_source()
source.read()                  # a Reading for each of source.devices, of the time since the last one
"""

import contextlib
import math
import os
import time
from typing import NamedTuple

from virtualgpu import session
from virtualgpu.engine.machine import Machine
from virtualgpu.environment import visible
from virtualgpu.timing.usage import Utilization

GAP = math.nan


class Reading(NamedTuple):
    """One device at one moment; NaN where it could not be read."""

    utilization: float  # percent of the time in which any kernel ran, NCCL's too, also while it waited
    computing: float = GAP  # percent, without NCCL's kernels; drivers do not tell


class Source:
    """Something that can be read: one Reading per device at each call, in the order of `devices`.

    interval: seconds from one reading to the next; None: a clock of its own, on which nothing passes by itself.
    origin: "measured" or "simulated".
    """

    devices: list[str]
    interval: float | None = 0.1
    origin = "measured"

    def now(self) -> float:
        """Seconds, on the clock by which it is read."""
        return time.perf_counter()

    def read(self) -> list[Reading]:
        """What there is to tell of the time since the last call."""
        raise NotImplementedError

    def close(self) -> None:
        """Most have nothing to end."""


class NoSource(RuntimeError):
    """What would be read is not there: no driver, no GPU."""


class VirtualSource(Source):
    """Virtual GPUs on their simulated clock. Work counts for the reading after it was queued, also where the GPU comes to it later."""

    interval = None
    origin = "simulated"

    def __init__(self, machine: Machine):
        self._gpus, self._clock, self._usage = machine.look(), machine.clock, Utilization(machine.clock)
        self.devices = [str(gpu.device) for gpu in self._gpus]
        self.read()

    def now(self) -> float:
        """Simulated time at which all that is queued is done."""
        return self._clock.latest()

    def read(self) -> list[Reading]:
        """Of work that was queued since the last call."""
        return [Reading(*(100 * share for share in self._usage.read(gpu.index))) for gpu in self._gpus]


class NVMLSource(Source):
    """Every GPU this process may use, through the driver's own library (nvidia-ml-py). Microseconds a call.

    NVML's utilization is itself an average over 1/6 to 1 s (NVIDIA's NVML reference, nvmlUtilization_t), so reading it
    more often than ten times a second tells nothing new.

    Raises NoSource where there is no driver or no visible GPU.
    """

    def __init__(self):
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        except Exception as error:  # not installed, no driver, driver and library at odds
            raise NoSource(f"NVML cannot be used: {error}") from error
        chosen = visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))  # this process's, in CUDA's order
        if not chosen:
            raise NoSource(f"NVML lists {len(uuids)} GPUs, and CUDA_VISIBLE_DEVICES leaves none of them visible")
        self.devices = [f"cuda:{i}" for i in range(len(chosen))]
        self._nvml, self._handles = pynvml, [handles[i] for i in chosen]

    def read(self) -> list[Reading]:
        """The driver's latest figure; NaN for a GPU of which it has none."""
        return [Reading(self._utilization(handle)) for handle in self._handles]

    def _utilization(self, handle) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except Exception:  # not supported on this GPU, or the GPU fell off the bus
            return GAP

    def close(self) -> None:
        """The driver's library is no longer used."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()


class CPUSource(Source):
    """This process on this machine's cores: the share of all usable ones that it keeps busy."""

    def __init__(self):
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._before = time.perf_counter(), time.process_time()
        self.devices = ["cpu"]

    def read(self) -> list[Reading]:
        """Processor time of all its threads, in and out of the system."""
        now, (then, before) = (time.perf_counter(), time.process_time()), self._before
        self._before = now
        return [Reading(100 * (now[1] - before) / (now[0] - then) / self._cores)]


def best_source() -> Source:
    """The virtual GPUs that are on, else NVML where there is a driver, else the CPU."""
    if machine := session.machine():
        return VirtualSource(machine)
    try:
        return NVMLSource()
    except NoSource:
        return CPUSource()
