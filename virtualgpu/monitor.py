"""How busy devices are, iteration by iteration: virtual GPUs, real ones by their driver (NVML), or the CPU.

    with Monitor() as monitor:
        for x, y in loader:
            ...
            monitor.step()          # an iteration ends here
    monitor.utilization()["cuda:0"]

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
from types import SimpleNamespace
from typing import NamedTuple

import torch

from virtualgpu import session
from virtualgpu.engine.machine import Machine
from virtualgpu.environment import visible
from virtualgpu.torch_api.nvml import SinceAsked

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
    """Virtual GPUs on their simulated clock. Work counts for the reading after it was queued, also where the GPU comes to it later. NCCL's
    kernels keep a GPU busy, as in nvidia-smi, also while they wait for other ranks; computing is what other kernels do."""

    interval = None
    origin = "simulated"

    def __init__(self, machine: Machine):
        clock = self._clock = machine.clock
        self._gpus = machine.look()
        self._busy = SinceAsked(lambda gpu: (clock.busy[gpu], clock.latest()))
        self._computing = SinceAsked(lambda gpu: (clock.computing[gpu], clock.latest()))
        self.devices = [str(gpu.device) for gpu in self._gpus]
        self.read()

    def now(self) -> float:
        """Simulated time at which all that is queued is done."""
        return self._clock.latest()

    def read(self) -> list[Reading]:
        """Of work that was queued since the last call."""
        kinds = (self._busy, self._computing)
        return [Reading(*(100 * kind.fraction(gpu.index) for kind in kinds)) for gpu in self._gpus]


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


class Monitor:
    """Reads a source in a thread while a `with` block runs; `step()` marks the end of an iteration (under 0.1 ms).

    samples: list of (iteration, [Reading per device]). step_times: seconds since the start at which each iteration ended, simulated on
    virtual GPUs.
    """

    def __init__(self, source: Source | None = None):
        self.source = source or best_source()
        self.devices = self.source.devices
        self.samples: list[tuple[int, list[Reading]]] = []
        self.step_times: list[float] = []
        self._allocated: list[list[float]] = []  # per iteration and device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        if self.source.interval is None:
            self.source.read()  # what was before is not of the first iteration
        self._start = self.source.now()
        if self.source.interval is not None:
            self._thread.start()
        return self

    def __getstate__(self) -> dict:
        """What a rank of `launch` sends back, to be drawn."""
        return {**vars(self), "source": SimpleNamespace(origin=self.source.origin), "_stop": None, "_thread": None}

    def step(self) -> None:
        """An iteration ends."""
        if self.source.interval is None:
            self.samples.append((len(self.step_times), self.source.read()))
        self.step_times.append(self.source.now() - self._start)
        self._allocated.append([_allocated(device) for device in self.devices])

    def __exit__(self, *error) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)  # a driver may hang: then it is left behind
        self.source.close()
        if self.samples and all(
            math.isnan(reading.utilization) for _, readings in self.samples for reading in readings
        ):
            warnings.warn(f"the monitor could not read {', '.join(self.devices)}: its plots are empty", stacklevel=2)

    def utilization(self) -> dict[str, list[float]]:
        """Percent per device: one figure an iteration, the mean of its readings, NaN where there was none."""
        return self._per_iteration("utilization")

    def computing(self) -> dict[str, list[float]]:
        """Percent per device as `utilization`, without NCCL's kernels; NaN where nobody tells, as of real GPUs."""
        return self._per_iteration("computing")

    def allocated(self) -> dict[str, list[float]]:
        """Bytes in this process's tensors per GPU, at the end of each iteration; NaN on the CPU."""
        return dict(zip(self.devices, map(list, zip(*self._allocated, strict=True)), strict=False))

    def _per_iteration(self, field: str) -> dict[str, list[float]]:
        table: dict[str, list[list[float]]] = {device: [[] for _ in self.step_times] for device in self.devices}
        for iteration, readings in self.samples:
            for device, reading in zip(self.devices, readings, strict=True):
                value = getattr(reading, field)
                if iteration < len(self.step_times) and not math.isnan(value):
                    table[device][iteration].append(value)
        return {device: [statistics.fmean(v) if v else GAP for v in values] for device, values in table.items()}

    def _watch(self) -> None:
        while not self._stop.wait(self.source.interval):
            iteration = len(self.step_times)
            try:
                readings = self.source.read()
            except Exception:
                readings = [Reading(GAP)] * len(self.devices)
            self.samples.append((iteration, readings))


def _allocated(device: str) -> float:
    """What PyTorch's tensors hold of a GPU, without waking one that this process does not use."""
    return torch.cuda.memory_allocated(device) if device != "cpu" and torch.cuda.is_initialized() else GAP
