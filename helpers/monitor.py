"""Utilization and memory per iteration, from whatever there is: virtual GPUs, the driver (NVML), or the CPU.

    with Monitor() as monitor:
        for x, y in loader:
            ...
            monitor.step()          # an iteration ends here
    plots.utilization(monitor, ...)

A thread does the reading, so that a training step never waits for a driver. Each reading carries the number of the
iteration it fell into. A reading that fails becomes a gap (NaN), never an error: watching must not stop a training.
Virtual GPUs are read at each step instead, on their simulated clock.
"""

import contextlib
import math
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import psutil
import torch

import virtualgpu
from virtualgpu.engine.meter import Meter
from virtualgpu.environment import visible

GAP = math.nan


@dataclass(frozen=True)
class Reading:
    """One device at one moment; NaN where it could not be read."""

    utilization: float  # percent of the time in which any kernel ran, NCCL's too, also while it waited
    memory: float  # bytes in use
    computing: float = field(default=math.nan, repr=False)  # percent, without NCCL's kernels; drivers do not tell


class Source:
    """Something that can be read: one Reading per device at each call, in the order of `devices`."""

    devices: list[str]
    interval: float | None = 0.1  # seconds from one reading to the next; None: read at each step
    origin = "measured"  # or "simulated"

    def read(self) -> list[Reading]: ...

    def close(self) -> None:
        """Most have nothing to end."""


class NoSource(RuntimeError):
    """What would be read is not there: no driver, no GPU."""


class VirtualSource(Source):
    """The virtual GPUs that are on, on their simulated clock. Work counts for the iteration that queued it."""

    interval = None
    origin = "simulated"

    def __init__(self):
        machine = virtualgpu.machine()
        if machine is None:
            raise NoSource("no virtual GPUs are on: call gpus() first")
        self.meter = Meter(machine)
        self.devices = self.meter.devices

    def read(self) -> list[Reading]:
        return [Reading(*figures) for figures in self.meter.read()]


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
        return [
            Reading(self._ask("UtilizationRates", h, "gpu"), self._ask("MemoryInfo", h, "used")) for h in self._handles
        ]

    def _ask(self, what: str, handle, field: str) -> float:
        try:
            return float(getattr(getattr(self._nvml, f"nvmlDeviceGet{what}")(handle), field))
        except Exception:  # not supported on this GPU, or the GPU fell off the bus
            return GAP

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()


class CPUSource(Source):
    """This process on this machine's cores: the share of all usable cores it keeps busy, and its resident memory."""

    def __init__(self):
        self._process = psutil.Process()
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._process.cpu_percent()  # the first call only starts the clock
        self.devices = ["cpu"]

    def read(self) -> list[Reading]:
        return [Reading(self._process.cpu_percent() / self._cores, self._process.memory_info().rss)]


def best_source() -> Source:
    """The virtual GPUs that are on, else NVML where there is a driver, else the CPU."""
    for source in (VirtualSource, NVMLSource):
        with contextlib.suppress(NoSource):
            return source()
    return CPUSource()


class Monitor:
    """Reads a source in a thread while a `with` block runs; `step()` marks the end of an iteration (under 0.1 ms).

    samples: list of (iteration, seconds since the start, [Reading per device]). Seconds are simulated on virtual GPUs.
    """

    def __init__(self, source: Source | None = None, interval: float | None = None):
        self.source = source or best_source()
        self.devices = self.source.devices
        self.interval = interval or self.source.interval
        self.samples: list[tuple[int, float, list[Reading]]] = []
        self.step_times: list[float] = []  # seconds since the start at which each iteration ended
        self._allocated: list[list[float]] = []  # per iteration and device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        if self.interval is None:
            self.source.read()  # what was before is not of the first iteration
        self._start = self._now()
        if self.interval is not None:
            self._thread.start()
        return self

    def __getstate__(self) -> dict:
        """What a rank of `launch` sends back, to be drawn."""
        return {**vars(self), "source": SimpleNamespace(origin=self.source.origin), "_stop": None, "_thread": None}

    def step(self) -> None:
        if self.interval is None:
            readings = self.source.read()
            self.samples.append((len(self.step_times), self._now() - self._start, readings))
        self.step_times.append(self._now() - self._start)
        self._allocated.append([_allocated(device) for device in self.devices])

    def _now(self) -> float:
        return time.perf_counter() if self.interval is not None else self.source.meter.seconds

    def __exit__(self, *error) -> None:
        self._stop.set()
        self.source.close()  # ends a reading that hangs, so that the thread ends too
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if self.samples and all(math.isnan(reading.memory) for _, _, readings in self.samples for reading in readings):
            warnings.warn(f"the monitor could not read {', '.join(self.devices)}: its plots are empty", stacklevel=2)

    def utilization(self) -> dict[str, list[float]]:
        """Percent per device: one figure an iteration, the mean of its readings, NaN where there was none."""
        return self._per_iteration("utilization", statistics.fmean)

    def computing(self) -> dict[str, list[float]]:
        """Percent per device as `utilization`, without NCCL's kernels; NaN where nobody tells, as of real GPUs."""
        return self._per_iteration("computing", statistics.fmean)

    def memory(self) -> dict[str, list[float]]:
        """Bytes per device: one figure an iteration, the largest of its readings, NaN where there was none."""
        return self._per_iteration("memory", max)

    def allocated(self) -> dict[str, list[float]]:
        """Bytes in this process's tensors per GPU, at the end of each iteration; NaN on the CPU."""
        return dict(zip(self.devices, map(list, zip(*self._allocated, strict=True)), strict=False))

    def _per_iteration(self, field: str, combine: Callable[[list[float]], float]) -> dict[str, list[float]]:
        table: dict[str, list[list[float]]] = {device: [[] for _ in self.step_times] for device in self.devices}
        for iteration, _, readings in self.samples:
            for device, reading in zip(self.devices, readings, strict=True):
                value = getattr(reading, field)
                if iteration < len(self.step_times) and not math.isnan(value):
                    table[device][iteration].append(value)
        return {device: [combine(v) if v else GAP for v in values] for device, values in table.items()}

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            iteration = len(self.step_times)
            try:
                readings = self.source.read()
            except Exception:
                readings = [Reading(GAP, GAP)] * len(self.devices)
            self.samples.append((iteration, time.perf_counter() - self._start, readings))


def _allocated(device: str) -> float:
    """What PyTorch's tensors hold of a GPU, without waking one that this process does not use."""
    return torch.cuda.memory_allocated(device) if device != "cpu" and torch.cuda.is_initialized() else GAP
