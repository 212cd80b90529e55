"""What PyTorch asks NVIDIA's management library about a GPU, on the simulated clock: torch.cuda.utilization and its kind.

A share of time is that of simulated time since the program last asked. A virtual GPU runs at the highest clock of its data sheet, and
draws its power limit for as long as it works, nothing in between: a bound for energy. It has no temperature.
"""

import torch

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.torch_api.gputil import load
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace utilization, memory_usage, clock_rate and power_draw; they raise ValueError for the CPU."""

    def gpu_of(device) -> GPU:
        gpu = machine.gpu(device)
        if gpu is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return gpu

    def utilization(device=None) -> int:
        """Percent of time in which kernels ran."""
        return round(100 * load(machine, gpu_of(device), "torch.cuda"))

    def memory_usage(device=None) -> int:
        """Percent of time in which memory was read or written: a kernel does so for as long as it lasts."""
        return round(100 * load(machine, gpu_of(device), "torch.cuda.memory_usage"))

    def clock_rate(device=None) -> int:
        """MHz."""
        return gpu_of(device).spec.clock_rate // 1000

    def power_draw(device=None) -> int:
        """Milliwatts. Raises NotImplementedError for a card that does not say its limit."""
        gpu = gpu_of(device)
        if gpu.spec.power is None:
            raise NotImplementedError(
                f"{gpu.spec.name}, virtual, does not say its power limit: give `power` in a card of your own"
            )
        return round(1000 * gpu.spec.power * load(machine, gpu, "torch.cuda.power_draw"))

    for function in (utilization, memory_usage, clock_rate, power_draw):
        patches.replace(torch.cuda, function.__name__, function)
