"""torch.cuda.MemPool and use_mem_pool: blocks of one pool serve no other. memory/private.py has the pools."""

import contextlib
import itertools
from collections.abc import Iterator

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.torch_api.registry import Patches

_numbers = itertools.count(1)  # of pools, in this process


def new_id() -> tuple[int, int]:
    """The next pool's; the first number is that of a graph."""
    return 0, next(_numbers)


def install(machine: Machine, patches: Patches) -> None:
    """Replace MemPool and graph_pool_handle, and the C functions by which a thread enters and leaves a pool."""

    @contextlib.contextmanager
    def memory(gpu: GPU) -> Iterator[CachingAllocator]:
        with gpu.lock:
            yield gpu.settled()

    def begin(device: int, id: tuple[int, int]) -> None:
        with memory(machine.gpu(device)) as allocator:
            allocator.enter_pool(tuple(id))

    def end(device: int, id: tuple[int, int]) -> None:
        with memory(machine.gpu(device)) as allocator:
            allocator.private.end(tuple(id))

    def release(device: int, id: tuple[int, int]) -> None:
        with memory(machine.gpu(device)) as allocator:
            allocator.private.let_go(tuple(id))

    class MemPool:
        __doc__ = torch.cuda.memory.MemPool.__doc__
        _gpu = None  # until it is made

        def __init__(self, allocator=None, use_on_oom: bool = False, no_split: bool = False, **others):
            if allocator is not None or use_on_oom or others:
                raise NotImplementedError(
                    "of torch.cuda.MemPool, virtual GPUs model no_split alone: leave allocator, use_on_oom and the others out"
                )
            gpu, self._id = machine.gpu(None), new_id()
            with memory(gpu) as found:
                found.hold_pool(self._id, no_split)
            self._gpu = gpu

        @property
        def id(self) -> tuple[int, int]:
            return self._id

        @property
        def allocator(self) -> None:
            return None

        @property
        def device(self) -> int:
            return self._gpu.index

        def use_count(self) -> int:
            return self._gpu.memory.private.known[self._id].uses

        def snapshot(self, include_traces: bool = True):
            found = _compat.memory_snapshot((*self._id, include_traces))
            return found["segments"]

        def __del__(self):
            if self._gpu is not None:
                self._gpu.drop_pool(self._id)

    MemPool.__module__, MemPool.__qualname__ = "torch.cuda.memory", "MemPool"
    patches.replace_everywhere(torch.cuda.memory, "MemPool", MemPool)
    patches.replace_everywhere(torch.cuda.graphs, "graph_pool_handle", new_id)
    functions = {
        "_cuda_beginAllocateCurrentThreadToPool": begin,
        "_cuda_endAllocateToPool": end,
        "_cuda_releasePool": release,
        "_graph_pool_handle": new_id,
    }
    for name, function in functions.items():
        patches.add(_compat.C, name, function)
        if name in vars(torch.cuda.memory):  # it holds the C function under its own name
            patches.replace(torch.cuda.memory, name, function)
