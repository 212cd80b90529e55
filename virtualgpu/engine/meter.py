"""Virtual GPUs as somebody sees them from outside: how busy, how full; and another process's share of one."""

import contextlib
from collections.abc import Iterator

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.simulation.usage import Utilization


class Meter:
    """A monitor's readings. Work counts for the reading after it was queued, also where the GPU comes to it later."""

    def __init__(self, machine: Machine):
        self._gpus, self._clock, self._usage = machine.look(), machine.clock, Utilization(machine.clock)
        self.devices = [str(gpu.device) for gpu in self._gpus]
        self.read()

    @property
    def seconds(self) -> float:
        """Simulated time at which all that is queued is done."""
        return self._clock.latest()

    def read(self) -> list[tuple[float, int, float]]:
        """Of each GPU: the percentage of time in which it was busy since the last reading, the bytes that nvidia-smi would
        call used (context and reserved memory, other processes' too), and the percentage in which it was computing."""
        shares = [self._usage.read(gpu.index) for gpu in self._gpus]
        return [
            (100 * busy, used(gpu), 100 * computing) for gpu, (busy, computing) in zip(self._gpus, shares, strict=True)
        ]


def used(gpu: GPU) -> int:
    """Bytes that are not free on a GPU, whoever holds them."""
    memory = gpu.settled()
    return memory.capacity - memory.free_on_gpu


@contextlib.contextmanager
def other_process(gpu: GPU, leave: int) -> Iterator[None]:
    """In this block, another process holds all of a GPU's free memory but `leave` bytes."""
    with gpu.lock:
        memory, before = (
            gpu.settled(),
            gpu.memory.others,
        )  # a number, or a function where a run's processes share the GPU
        taken = max(0, memory.free_on_gpu - leave)
        memory.others = lambda: taken + (before() if callable(before) else before)
    try:
        yield
    finally:
        with gpu.lock:
            memory.others = before
