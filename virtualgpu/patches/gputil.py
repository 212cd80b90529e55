"""GPUtil, and whoever else asks for a GPU's load, on the simulated clock."""

import sys

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.hardware.specs import MIB
from virtualgpu.patches.registry import Patches


def load(machine: Machine, gpu: GPU, asker: str) -> float:
    """The share of simulated time in which this GPU was busy since `asker` last asked, of work already queued; 0 to 1."""
    clock, asked = machine.clock, machine.asked.setdefault((asker, gpu.index), (0.0, 0.0))
    now, busy = max(clock.host, *clock.ready), clock.busy[gpu.index]
    machine.asked[asker, gpu.index] = (now, busy)
    return (busy - asked[1]) / (now - asked[0]) if now > asked[0] else 0.0


def install(machine: Machine, patches: Patches) -> None:
    """Let GPUtil, where it is installed, list the virtual GPUs."""
    try:
        from GPUtil import GPUtil as module
    except ImportError:
        return

    def getGPUs() -> list:
        """As nvidia-smi lists them: memory in MiB, reserved and context counted as used."""
        found = []
        for gpu in machine.gpus:
            memory = gpu.settled()
            total, free = memory.capacity // MIB, memory.free_on_gpu // MIB
            busy = load(machine, gpu, "GPUtil")
            found.append(
                module.GPU(
                    gpu.index,
                    f"GPU-virtual-{gpu.index}",
                    busy,
                    float(total),
                    float(total - free),
                    float(free),
                    "virtual",
                    gpu.spec.name,
                    "",
                    "Disabled",
                    "Disabled",
                    float("nan"),
                )
            )
        return found

    patches.replace(module, "getGPUs", getGPUs)
    patches.replace(sys.modules["GPUtil"], "getGPUs", getGPUs)
