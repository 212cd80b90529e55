"""GPUtil, and whoever else asks for a GPU's load, on the simulated clock."""

import sys

from virtualgpu import environment
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.hardware.specs import MIB
from virtualgpu.timing.usage import Utilization
from virtualgpu.torch_api.nvml import DRIVER
from virtualgpu.torch_api.registry import Patches


def load(machine: Machine, gpu: GPU, asker: str) -> float:
    """The share of simulated time in which this GPU was busy since `asker` last asked, of work already queued; 0 to 1."""
    return machine.asked.setdefault(asker, Utilization(machine.clock)).load(gpu.index)


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
                    gpu.physical,
                    environment.uuid(gpu.physical),
                    busy,
                    float(total),
                    float(total - free),
                    float(free),
                    DRIVER,
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
