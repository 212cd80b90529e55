"""Utilization and memory per iteration, from whatever there is: virtual GPUs, NVML, nvidia-smi through GPUtil, or the CPU.

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
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch

import virtualgpu

GAP = math.nan


@dataclass(frozen=True)
class Reading:
    """One device at one moment; NaN where it could not be read."""

    utilization: float  # percent
    memory: float  # bytes in use


class Source(Protocol):
    """Something that can be read: one Reading per device at each call, in the order of `devices`."""

    devices: list[str]
    interval: float | None  # seconds from one reading to the next; None: read at each step
    origin: str  # "measured" or "simulated"

    def read(self) -> list[Reading]: ...
    def close(self) -> None: ...


class VirtualSource:
    """The virtual GPUs that are on: how busy each was since the last reading, and what nvidia-smi would call used (context and
    reserved memory).

    Work counts for the iteration that queued it, also where the GPU comes to it later.
    """

    interval = None
    origin = "simulated"

    def __init__(self):
        self._machine = virtualgpu.machine()
        if self._machine is None:
            raise RuntimeError("no virtual GPUs are on: call gpus() first")
        self.devices = [str(gpu.device) for gpu in self._machine.gpus]
        self.seconds = 0.0
        self._mark()

    def read(self) -> list[Reading]:
        before, busy = self.seconds, self._busy
        self._mark()
        passed = self.seconds - before
        shares = [100 * (now - then) / passed if passed else 0.0 for now, then in zip(self._busy, busy, strict=True)]
        memories = (gpu.settled() for gpu in self._machine.gpus)
        return [Reading(share, m.capacity - m.free_on_gpu) for share, m in zip(shares, memories, strict=True)]

    def _mark(self) -> None:
        clock = self._machine.clock
        self.seconds, self._busy = clock.latest(), list(clock.busy)

    def close(self) -> None:
        pass


class NVMLSource:
    """Every GPU this process may use, through the driver's own library (nvidia-ml-py). Microseconds a call.

    NVML's utilization is itself an average over 1/6 to 1 s (NVIDIA's NVML reference, nvmlUtilization_t), so reading more
    often than ten times a second tells nothing new. NVML counts all GPUs of the machine; CUDA_VISIBLE_DEVICES is applied here.

    Raises RuntimeError where there is no driver or no visible GPU.
    """

    interval = 0.1
    origin = "measured"

    def __init__(self):
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # not installed, no driver, driver and library at odds
            raise RuntimeError(f"NVML cannot be used: {error}") from error
        self._nvml = pynvml
        try:
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in self._handles]
        except Exception as error:
            self.close()
            raise RuntimeError(f"NVML found no usable GPU: {error}") from error
        self._handles = [self._handles[i] for i in visible(uuids)]
        self.devices = [f"cuda:{i}" for i in range(len(self._handles))]
        if not self.devices:
            self.close()
            raise RuntimeError("NVML sees no GPU that CUDA_VISIBLE_DEVICES leaves visible")

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


class GPUtilSource:
    """The GPUs as GPUtil reports them. It starts `nvidia-smi` at every call, hence the slow interval.

    GPUtil waits for ever for an nvidia-smi that hangs, and raises on output that it does not expect. Here a call that takes
    longer than `limit` seconds is ended, and whatever goes wrong becomes a gap.

    Raises RuntimeError where GPUtil or nvidia-smi is missing, or the first call yields no GPU.
    """

    interval = 1.0
    origin = "measured"
    _one_at_a_time = threading.Lock()  # GPUtil's Popen is one for the whole process

    def __init__(self, limit: float = 5.0):
        try:
            import GPUtil.GPUtil as module
        except Exception as error:  # not installed; or no distutils, which it needs: pip install setuptools
            raise RuntimeError(f"GPUtil cannot be used: {error}") from error
        self._module, self._limit = module, limit
        self._child: subprocess.Popen | None = None
        self._closed = False
        found = self._gpus()
        kept = visible([gpu.uuid for gpu in found])
        self._uuids = [found[i].uuid for i in kept]
        self.devices = [f"cuda:{i}" for i in range(len(kept))]
        if not self.devices:
            raise RuntimeError("GPUtil found no GPU: is nvidia-smi on the PATH, and does it work?")

    def read(self) -> list[Reading]:
        now = {gpu.uuid: Reading(100.0 * gpu.load, gpu.memoryUsed * 2**20) for gpu in self._gpus()}
        return [now.get(uuid, Reading(GAP, GAP)) for uuid in self._uuids]

    def _gpus(self) -> list:
        with self._one_at_a_time:
            original, self._module.Popen = self._module.Popen, self._start
            try:
                return self._module.getGPUs()
            except Exception:  # ValueError, IndexError, ZeroDivisionError: GPUtil met output it does not know
                return []
            finally:
                self._module.Popen = original

    def _start(self, command, **options):
        """GPUtil's Popen: the same, with an end. The whole process group goes, since a wrapper script may have children."""
        if self._closed:
            raise OSError("the monitor has stopped")
        self._child = child = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, **options)
        timer = threading.Timer(self._limit, _end, [child])
        timer.daemon = True
        timer.start()
        communicate = child.communicate

        def and_then_cancel(*args, **kwargs):
            try:
                return communicate(*args, **kwargs)
            finally:
                timer.cancel()

        child.communicate = and_then_cancel
        return child

    def close(self) -> None:
        self._closed = True
        if self._child is not None:
            _end(self._child)


class CPUSource:
    """This process on this machine's cores: the share of all usable cores it keeps busy, and its resident memory."""

    interval = 0.1
    origin = "measured"

    def __init__(self):
        self._process = psutil.Process()
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._process.cpu_percent()  # the first call only starts the clock
        self.devices = ["cpu"]

    def read(self) -> list[Reading]:
        return [Reading(self._process.cpu_percent() / self._cores, self._process.memory_info().rss)]

    def close(self) -> None:
        pass


def best_source() -> Source:
    """The virtual GPUs that are on, else NVML where there is a driver, else GPUtil where nvidia-smi works, else the CPU."""
    for source in (VirtualSource, NVMLSource, GPUtilSource):
        try:
            return source()
        except RuntimeError:
            continue
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

    def step(self) -> None:
        if self.interval is None:
            readings = self.source.read()
            self.samples.append((len(self.step_times), self._now() - self._start, readings))
        self.step_times.append(self._now() - self._start)
        self._allocated.append([_allocated(device) for device in self.devices])

    def _now(self) -> float:
        return time.perf_counter() if self.interval is not None else self.source.seconds

    def __exit__(self, *error) -> None:
        self._stop.set()
        self.source.close()  # ends a reading that hangs, so that the thread ends too
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def utilization(self) -> dict[str, list[float]]:
        """Percent per device: one figure an iteration, the mean of its readings, NaN where there was none."""
        return self._per_iteration(lambda reading: reading.utilization, lambda values: sum(values) / len(values))

    def memory(self) -> dict[str, list[float]]:
        """Bytes per device: one figure an iteration, the largest of its readings, NaN where there was none."""
        return self._per_iteration(lambda reading: reading.memory, max)

    def allocated(self) -> dict[str, list[float]]:
        """Bytes in this process's tensors per GPU, at the end of each iteration; NaN on the CPU."""
        return dict(zip(self.devices, map(list, zip(*self._allocated, strict=True)), strict=False))

    def _per_iteration(self, field, combine) -> dict[str, list[float]]:
        table = {}
        for column, device in enumerate(self.devices):
            found: list[list[float]] = [[] for _ in self.step_times]
            for iteration, _, readings in self.samples:
                value = field(readings[column])
                if iteration < len(found) and not math.isnan(value):
                    found[iteration].append(value)
            table[device] = [combine(values) if values else GAP for values in found]
        return table

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


def visible(uuids: list[str]) -> list[int]:
    """Which of the machine's GPUs, by index, CUDA calls 0, 1, ...: CUDA_VISIBLE_DEVICES as the CUDA guide describes it.

    It lists indices or the beginnings of UUIDs; the first one that names no GPU ends the list.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(len(uuids)))
    chosen = []
    for name in (part.strip() for part in wanted.split(",")):
        if name.isdigit() and int(name) < len(uuids):
            chosen.append(int(name))
        elif name.startswith("GPU-") and sum(uuid.startswith(name) for uuid in uuids) == 1:
            chosen.append(next(i for i, uuid in enumerate(uuids) if uuid.startswith(name)))
        else:
            break
    return chosen


def _end(child: subprocess.Popen) -> None:
    if child.poll() is not None:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):  # Windows; or it ended meanwhile
        child.kill()
