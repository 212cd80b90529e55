"""The C functions below torch/cuda/memory.py and torch/accelerator/memory.py, answered by the virtual GPUs' allocators.

PyTorch's own Python code stays as it is: memory_stats, memory_summary, memory_snapshot, _record_memory_history,
_dump_snapshot and the rest. What the allocators do not model (other allocators, figures of pinned memory) is refused by `surface`.
"""

import itertools
from contextlib import ExitStack
from typing import Any

import torch

from virtualgpu import _compat
from virtualgpu.engine.dispatch import operation_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import ALLOCATION
from virtualgpu.memory import config, snapshot
from virtualgpu.memory.allocator import Block
from virtualgpu.memory.snapshot import History
from virtualgpu.torch_api.patches import Patches
from virtualgpu.torch_api.streams import id_of


def install(machine: Machine, patches: Patches) -> None:
    """Replace them, until `patches.restore()`."""
    functions = Memory(machine)
    for name in vars(Memory):
        if name.startswith(("_cuda_", "_host_", "_graph_")):
            patches.add(_compat.C, name, getattr(functions, name))
        elif name.startswith("_accelerator_") and hasattr(_compat.C, name):
            patches.replace(_compat.C, name, getattr(functions, name))
    if hasattr(torch.cuda.memory, "_annotate_tensor"):
        patches.replace(torch.cuda.memory, "_annotate_tensor", functions.annotate_tensor)
    patches.replace_everywhere(torch.cuda.memory, "MemPool", PoolId)
    patches.replace_everywhere(torch.cuda.graphs, "graph_pool_handle", new_pool)


_pools = itertools.count(1)  # numbers, in this process


def new_pool() -> tuple[int, int]:
    """The next pool's two numbers; the first is that of a graph."""
    return 0, next(_pools)


class PoolId:  # by another name than MemPool: Patches.restore exchanges that one in every module
    """torch.cuda.MemPool, which can be made and has an id. To allocate in one (use_mem_pool) is refused by `surface`."""

    def __init__(self, *args, **options):
        self.id = new_pool()


class Memory:
    """The functions, each under its name in torch._C. Devices are indices; sizes are bytes."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.raw: dict[int, tuple[GPU, Block]] = {}  # of caching_allocator_alloc, by address

    def _gpu(self, index: int) -> GPU:
        if not isinstance(index, int) or not 0 <= index < len(self.machine.gpus):
            raise RuntimeError(f"Invalid device argument {index}: did you call init?")
        return self.machine.gpus[index]

    # -- figures

    def _cuda_memoryStats(self, device: int) -> dict[str, Any]:
        with self._gpu(device).only() as memory:
            return memory.statistics.nested()

    def _cuda_resetPeakMemoryStats(self, device: int) -> None:
        gpu = self._gpu(device)
        with gpu.only() as memory:
            if self.machine.ledger is not None and memory.peak_reserved:
                gpu.note(self.machine.ledger, memory)  # the runner's table has the peak of the whole run
            memory.statistics.reset_peaks()

    def _cuda_resetAccumulatedMemoryStats(self, device: int) -> None:
        with self._gpu(device).only() as memory:
            memory.statistics.reset_accumulated()

    def _cuda_getMemoryFraction(self, device: int) -> float:
        with self._gpu(device).only() as memory:
            return memory.limit / memory.capacity

    def _cuda_setMemoryFraction(self, fraction: float, device: int) -> None:
        if not 0 <= fraction <= 1:
            raise RuntimeError(f"invalid fraction:{fraction}. Please set within [0, 1].")
        with self._gpu(device).only() as memory:
            memory.limit_to(int(fraction * memory.capacity))

    def _cuda_emptyCache(self) -> None:
        for gpu in self.machine.gpus:
            self.machine.clock.check(gpu.index)
            with gpu.only() as memory:
                memory.empty_cache()

    def _host_emptyCache(self) -> None:
        """No pinned memory is cached."""

    def _cuda_getAllocatorBackend(self) -> str:
        return "native"

    # -- memory without a tensor

    def _cuda_cudaCachingAllocator_raw_alloc(self, size: int, stream: int) -> int:
        gpu = self.machine.expect_gpu()
        with gpu.only() as memory:
            block = memory.malloc(size, id_of(stream))
        if block is None:  # of no bytes
            return 0
        self.raw[block.address] = (gpu, block)
        return block.address

    def _cuda_cudaCachingAllocator_raw_delete(self, ptr: int) -> None:
        if ptr:
            if ptr not in self.raw:
                raise RuntimeError(f"invalid device pointer: {ptr:#x}")
            gpu, block = self.raw.pop(ptr)
            with gpu.only() as memory:
                memory.free(block)

    def _cuda_cudaCachingAllocator_enable(self, value: bool) -> None:
        if not value:
            raise NotImplementedError("memory past the cache is not modelled on virtual GPUs: leave the cache on")

    def _cuda_cudaCachingAllocator_is_enabled(self) -> bool:
        return True

    _graph_pool_handle = staticmethod(new_pool)

    # -- history

    def _cuda_record_memory_history(
        self,
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 1,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: list[str] | None = None,
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        level, entries = snapshot.options(enabled, context, stacks, max_entries)
        if enabled is not None and record_pinned_host_memory:
            raise NotImplementedError(
                "the history of pinned memory is not modelled on virtual GPUs; leave record_pinned_host_memory out"
            )
        name = operation_of if stacks == "all" else None
        for gpu in self.machine.gpus if record_cuda or enabled is None else ():
            with gpu.only() as memory:
                new = History(memory.timeline, level, entries, skip_actions or (), name) if enabled else None
                if new is not None and memory.history is not None and not clear_history:
                    new.events.extend(memory.history.events)
                memory.record(new)

    def _cuda_record_memory_history_legacy(
        self, enabled: bool, context=True, max_entries=1, alloc_context=False, cpp_context=False, *others
    ) -> None:
        kept = "alloc" if alloc_context else "state" if context else None
        stacks = "all" if cpp_context else "python"
        self._cuda_record_memory_history("all" if enabled else None, kept, stacks, max_entries, *others)

    def _cuda_isHistoryEnabled(self) -> bool:
        return self.machine.expect_gpu().memory.history is not None

    def _cuda_memorySnapshot(self, pool: tuple | None = None) -> dict[str, Any]:
        """pool: None, or the two numbers of a pool, which `include_traces` may follow."""
        with ExitStack() as locks:
            allocators = [locks.enter_context(gpu.only()) for gpu in self.machine.gpus]
            return snapshot.snapshot(allocators, include_traces=pool is None or len(pool) < 3 or bool(pool[2]))

    def _cuda_attach_out_of_memory_observer(self, observer) -> None:
        """observer(device, bytes asked of the GPU, bytes allowed, bytes free), before the error is raised."""
        for gpu in self.machine.gpus:
            with gpu.only() as memory:
                memory.oom_observers.append(observer)

    def _cuda_memoryMetadataSupported(self) -> bool:
        return True

    def _cuda_setMemoryMetadata(self, metadata: str) -> None:
        snapshot.metadata.text = metadata

    def _cuda_getMemoryMetadata(self) -> str:
        return snapshot.metadata.text

    def _cuda_allocationTraceback(self, data_ptr: int) -> list[dict[str, Any]] | None:
        if data_ptr in self.raw:
            context = self.raw[data_ptr][1].context
            return None if context is None else snapshot.frames_of(context)
        raise NotImplementedError(
            "on virtual GPUs data_ptr() is an address of the host's memory, so no allocation is found by it; "
            "torch.cuda.memory._snapshot() has the frames of all blocks"
        )

    def annotate_tensor(self, tensor: torch.Tensor, metadata: str) -> None:
        """torch.cuda.memory._annotate_tensor: it would look for the allocation by an address of the GPU."""
        if not tensor.is_cuda:
            raise ValueError(f"expected a CUDA tensor, got device {tensor.device}")
        allocation = getattr(tensor.untyped_storage(), ALLOCATION, None)
        if allocation is None or allocation.block is None:
            return
        with allocation.gpu.only() as memory:
            if memory.history is not None:
                block = allocation.block
                context = memory.history.gather()
                memory.history.note("annotate", block.address, block.requested, block.stream, context, metadata)

    # -- torch.accelerator, and settings

    def _accelerator_isAllocatorInitialized(self) -> bool:
        return torch.cuda.is_initialized()

    def _accelerator_getMemoryInfo(self, device: int) -> tuple[int, int]:
        gpu = self._gpu(device)
        self.machine.clock.check(gpu.index)
        with gpu.only() as memory:
            return memory.free_on_gpu, memory.capacity

    def _accelerator_getAllocatorSettings(self) -> str:
        return self.machine.gpus[0].memory.config.text

    def _accelerator_setAllocatorSettings(self, env: str) -> None:
        settings = config.parse(env, self.machine.gpus[0].memory.config)
        for gpu in self.machine.gpus:
            with gpu.only() as memory:
                memory.configure(settings)

    _accelerator_emptyCache = _cuda_emptyCache
    _accelerator_emptyHostCache = _host_emptyCache
    _accelerator_getDeviceStats = _cuda_memoryStats
    _accelerator_resetAccumulatedStats = _cuda_resetAccumulatedMemoryStats
    _accelerator_resetPeakStats = _cuda_resetPeakMemoryStats
