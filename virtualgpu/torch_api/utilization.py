"""How busy a GPU is, on the simulated clock: torch.cuda.utilization and its kind, which ask NVIDIA's management library, and GPUtil.

A share of time is that of simulated time since the program last asked. A virtual GPU runs at the highest clock of its data sheet, and
draws its power limit for as long as it works, nothing in between: a bound for energy. It has no temperature."""

import functools
from types import ModuleType

import torch

from virtualgpu import environment
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.hardware.specs import MIB
from virtualgpu.memory.ledger import share
from virtualgpu.timing.clock import Clock
from virtualgpu.torch_api.nvml import DRIVER
from virtualgpu.torch_api.patches import Patches, when_imported


def install(machine: Machine, patches: Patches) -> None:
    """Replace functions of torch.cuda and, once somebody imports it, GPUtil's list: it brings setuptools along."""
    monitor = Monitor(machine)
    for name in ("utilization", "memory_usage", "clock_rate", "power_draw"):
        patches.replace(torch.cuda, name, getattr(monitor, name))
    when_imported("GPUtil", functools.partial(_replace_list, monitor, patches), patches)


def _replace_list(monitor: "Monitor", patches: Patches, package: ModuleType) -> None:
    for owner in (package, package.GPUtil):
        patches.replace(owner, "getGPUs", lambda: monitor.rows(package.GPU))


class Utilization:
    """How busy GPUs were since somebody last asked, what NVML and GPUtil call utilization, on the simulated clock: one who asks, again and again.

    NCCL's kernels count, as in nvidia-smi, also while they wait for other ranks; computing is what other kernels do. Work counts from when it is
    queued, also where the GPU comes to it later."""

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


class Monitor:
    """The functions. They raise ValueError for the CPU."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.asked: dict[str, Utilization] = {}  # {who asks: since when}

    def _gpu(self, device) -> GPU:
        gpu = self.machine.gpu(device)
        if gpu is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return gpu

    def _load(self, gpu: GPU, asker: str) -> float:
        """The share of simulated time in which this GPU was busy since `asker` last asked, of work already queued; 0 to 1."""
        return self.asked.setdefault(asker, Utilization(self.machine.clock)).load(gpu.index)

    def utilization(self, device=None) -> int:
        """Percent of time in which kernels ran."""
        return round(100 * self._load(self._gpu(device), "utilization"))

    def memory_usage(self, device=None) -> int:
        """Percent of time in which memory was read or written: a kernel does so for as long as it lasts."""
        return round(100 * self._load(self._gpu(device), "memory_usage"))

    def clock_rate(self, device=None) -> int:
        """MHz."""
        return self._gpu(device).spec.clock_rate // 1000

    def power_draw(self, device=None) -> int:
        """Milliwatts. Raises NotImplementedError for a card that does not say its limit."""
        gpu = self._gpu(device)
        if gpu.spec.power is None:
            raise NotImplementedError(
                f"{gpu.spec.name}, virtual, does not say its power limit: give `power` in a card of your own"
            )
        return round(1000 * gpu.spec.power * self._load(gpu, "power_draw"))

    def rows(self, kind: type) -> list:
        """GPUtil's objects, as nvidia-smi lists them: memory in MiB, reserved and context counted as used."""
        rows = []
        for gpu in self.machine.gpus:
            memory, uuid = gpu.settled(), environment.uuid(gpu.physical)
            total, free = float(memory.capacity // MIB), float(memory.free_on_gpu // MIB)
            known = total, total - free, free, DRIVER, gpu.spec.name
            rows.append(
                kind(gpu.physical, uuid, self._load(gpu, "GPUtil"), *known, "", "Disabled", "Disabled", float("nan"))
            )
        return rows
