"""The face of torch.cuda and torch.accelerator while virtual GPUs are on: the functions that lessons and tutorials call.

What is not modelled raises NotImplementedError and says so, rather than give a figure that means nothing.
"""

import contextlib
import functools
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.patches.gputil import load
from virtualgpu.patches.registry import Patches
from virtualgpu.patches.streams import Stream, event_class

MODES = "virtual GPUs have one stream per GPU and run eager PyTorch"
NOT_MODELLED = {
    torch.cuda: "CUDAGraph graph make_graphed_callables Stream ExternalStream MemPool use_mem_pool memory_snapshot "
    "caching_allocator_alloc caching_allocator_delete CUDAPluggableAllocator change_current_allocator temperature power_draw "
    "clock_rate cudart jiterator list_gpu_processes",
    torch.cuda.memory: "_record_memory_history _snapshot _dump_snapshot memory_snapshot",
    torch: "compile",
}


class CUDA:
    """The functions that replace those of torch.cuda; `install` says which. A device is an index, a name, a torch.device or None."""

    def __init__(self, machine: Machine, patches: Patches):
        self.machine, self.patches = machine, patches

    def install(self) -> None:
        for name in PUBLIC:
            self.patches.replace(torch.cuda, name, getattr(self, name))
        for name in ("memory", "random"):
            module = getattr(torch.cuda, name)
            for public in PUBLIC:
                if public in vars(module):
                    self.patches.replace(module, public, getattr(self, public))
        self.patches.replace(torch.cuda, "Event", event_class(self.machine))
        self.patches.replace(torch.cuda, "device", _device(self.machine))
        self.patches.replace(torch.cuda, "device_of", _device_of(self.machine))
        for name, ours in ACCELERATOR.items():
            if name in vars(torch.accelerator):
                self.patches.replace(torch.accelerator, name, getattr(self, ours))
        self.patches.replace(
            torch.backends.cudnn, "is_acceptable", lambda tensor: False
        )  # the CPU's kernels do the work
        for module, names in NOT_MODELLED.items():
            for name in names.split():
                if hasattr(module, name):
                    self.patches.replace(
                        module, name, _not_modelled(f"{module.__name__}.{name}", getattr(module, name))
                    )
        message = "nn.DataParallel copies in C++ where virtual GPUs cannot follow, and is not modelled; notebook 04 writes it out"
        self.patches.replace(torch.nn.DataParallel, "forward", _raising(message))

    def _gpu(self, device=None) -> GPU:
        gpu = self.machine.gpu(device)
        if gpu is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return gpu

    # -- which GPUs there are

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        """There is nothing to start."""

    def device_count(self) -> int:
        return len(self.machine.gpus)

    def current_device(self) -> int:
        return self.machine.local.current

    def set_device(self, device) -> None:
        self.machine.local.current = self._gpu(device).index

    def get_device_name(self, device=None) -> str:
        return self._gpu(device).spec.name

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return self._gpu(device).spec.capability

    def get_device_properties(self, device=None) -> SimpleNamespace:
        spec = self._gpu(device).spec
        major, minor = spec.capability
        return SimpleNamespace(
            name=spec.name,
            major=major,
            minor=minor,
            total_memory=spec.memory,
            multi_processor_count=spec.processors,
        )

    def can_device_access_peer(self, device, peer_device) -> bool:
        return self._gpu(device) is not self._gpu(peer_device)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self._gpu().spec.capability >= (8, 0)

    def get_arch_list(self) -> list[str]:
        return ["sm_{}{}".format(*gpu.spec.capability) for gpu in self.machine.gpus[:1]]

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    # -- memory, in bytes

    def memory_allocated(self, device=None) -> int:
        return self._gpu(device).settled().allocated

    def max_memory_allocated(self, device=None) -> int:
        return self._gpu(device).settled().peak_allocated

    def memory_reserved(self, device=None) -> int:
        return self._gpu(device).settled().reserved

    def max_memory_reserved(self, device=None) -> int:
        return self._gpu(device).settled().peak_reserved

    def reset_peak_memory_stats(self, device=None) -> None:
        self._gpu(device).settled().reset_peaks()

    def empty_cache(self) -> None:
        for gpu in self.machine.gpus:
            self.machine.clock.check(gpu.index)
            gpu.settled().empty_cache()

    def mem_get_info(self, device=None) -> tuple[int, int]:
        gpu = self._gpu(device)
        self.machine.clock.check(gpu.index)
        memory = gpu.settled()
        return memory.free_on_gpu, memory.capacity

    def device_memory_used(self, device=None) -> int:
        free, total = self.mem_get_info(device)
        return total - free

    def set_per_process_memory_fraction(self, fraction: float, device=None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        memory = self._gpu(device).settled()
        memory.limit = int(fraction * memory.capacity)

    def get_per_process_memory_fraction(self, device=None) -> float:
        memory = self._gpu(device).settled()
        return memory.limit / memory.capacity

    def memory_stats(self, device=None) -> dict[str, Any]:
        """Those figures of PyTorch's that are modelled, under PyTorch's names."""
        memory = self._gpu(device).settled()
        return OrderedDict(
            {
                "allocated_bytes.all.current": memory.allocated,
                "allocated_bytes.all.peak": memory.peak_allocated,
                "reserved_bytes.all.current": memory.reserved,
                "reserved_bytes.all.peak": memory.peak_reserved,
                "requested_bytes.all.current": memory.requested,
                "requested_bytes.all.peak": memory.peak_requested,
                "num_alloc_retries": memory.retries,
                "num_ooms": memory.ooms,
            }
        )

    def memory_summary(self, device=None, abbreviated: bool = False) -> str:
        gpu = self._gpu(device)
        rows = "\n".join(f"{name:<30} {value:>16,}" for name, value in self.memory_stats(device).items())
        return f"{gpu.device}, {gpu.spec.name}, virtual\n{rows}"

    def ipc_collect(self) -> None:
        """No memory is shared with other processes."""

    # -- time

    def synchronize(self, device=None) -> None:
        self.machine.clock.wait(self._gpu(device).index)

    def current_stream(self, device=None) -> "Stream":
        return Stream(self.machine, self._gpu(device))

    def is_current_stream_capturing(self) -> bool:
        return False

    default_stream = current_stream

    def stream(self, stream):
        if stream is None or isinstance(stream, Stream):
            return contextlib.nullcontext()
        raise NotImplementedError(f"streams of one's own are not modelled: {MODES}")

    def utilization(self, device=None) -> int:
        """Percent of the time since the last question, on the simulated clock."""
        gpu = self._gpu(device)
        return round(100 * load(self.machine, gpu, "torch.cuda"))

    # -- random numbers: drawn by the CPU's generator, so that they equal the CPU's

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    def seed(self) -> None:
        torch.default_generator.seed()

    seed_all = seed

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def get_rng_state(self, device="cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state() for _ in self.machine.gpus]

    def set_rng_state(self, new_state, device="cuda") -> None:
        torch.set_rng_state(new_state)

    def set_rng_state_all(self, new_states) -> None:
        torch.set_rng_state(new_states[0])


PUBLIC = [name for name in vars(CUDA) if not name.startswith("_") and name not in ("install", "current_accelerator")]
# torch.accelerator calls some of the same things by another name
ACCELERATOR = {
    "is_available": "is_available",
    "device_count": "device_count",
    "current_accelerator": "current_accelerator",
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "synchronize": "synchronize",
    "current_stream": "current_stream",
    "empty_cache": "empty_cache",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "get_memory_info": "mem_get_info",
    "memory_stats": "memory_stats",
}


def _device(machine: Machine):
    class device:
        """torch.cuda.device(1): the current GPU, for as long as the block lasts."""

        def __init__(self, device):
            self.index = -1 if device is None or device == -1 else machine.gpu(device).index

        def __enter__(self):
            self.before = machine.local.current
            if self.index >= 0:
                machine.local.current = self.index

        def __exit__(self, *error):
            machine.local.current = self.before
            return False

    return device


def _device_of(machine: Machine):
    class device_of(_device(machine)):
        def __init__(self, obj):
            super().__init__(obj.get_device() if obj.is_cuda else None)

    return device_of


def _not_modelled(name: str, original):
    return functools.wraps(original)(
        _raising(f"{name} is not modelled: {MODES}. It works on real GPUs, or after virtualgpu.reset()")
    )


def _raising(message: str):
    def raising(*args, **kwargs):
        raise NotImplementedError(message)

    return raising
