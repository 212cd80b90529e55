"""How busy GPUs were since somebody last asked: what NVML and GPUtil call utilization, on the simulated clock.

NCCL's kernels count, as in nvidia-smi, also while they wait for other ranks; computing is what other kernels do.
"""

from virtualgpu.memory.ledger import share
from virtualgpu.timing.clock import Clock


class Utilization:
    """One who asks, again and again. Work counts from when it is queued, also where the GPU comes to it later."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._before: dict[int, tuple[float, float, float]] = {}

    def load(self, gpu: int) -> float:
        """The share of simulated time in which this GPU was busy since the last call for it (at first: since time 0);
        0 to 1."""
        return self.read(gpu)[0]

    def read(self, gpu: int) -> tuple[float, float]:
        """The same, and the share in which it was computing: busy with other kernels than NCCL's."""
        computing, latest = self._clock.computing[gpu], self._clock.latest()
        now = self._clock.busy[gpu], computing, latest
        before = self._before.get(gpu, (0.0, 0.0, 0.0))
        self._before[gpu] = now
        return share((now[0], latest), (before[0], before[2])), share((computing, latest), before[1:])
