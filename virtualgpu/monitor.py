"""Utilization and memory, iteration by iteration, of whatever there is: virtual GPUs, real ones, or the CPU.

    with Monitor() as monitor:
        for x, y in loader:
            ...
            monitor.step()          # an iteration ends here
    monitor.utilization()["cuda:0"]

A thread does the reading, so that a training step never waits for a driver. Each reading carries the number of the
iteration it fell into. A reading that fails becomes a gap (NaN), never an error: watching must not stop a training.
Virtual GPUs are read at each step instead, on their simulated clock.
"""

import math
import statistics
import threading
import warnings
from types import SimpleNamespace

import torch

from virtualgpu.sources import GAP, Reading, Source, best_source


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
