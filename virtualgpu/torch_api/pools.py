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
    documented = {"__module__": "torch.cuda.memory", "__doc__": torch.cuda.memory.MemPool.__doc__}
    patches.replace_everywhere(
        torch.cuda.memory, "MemPool", type("MemPool", (MemPool,), documented | {"machine": machine})
    )
    patches.replace_everywhere(torch.cuda.graphs, "graph_pool_handle", new_id)
    pools = Pools(machine)
    for name, function in {
        "_cuda_beginAllocateCurrentThreadToPool": pools.begin,
        "_cuda_endAllocateToPool": pools.end,
        "_cuda_releasePool": pools.release,
        "_graph_pool_handle": new_id,
    }.items():
        patches.add(_compat.C, name, function)
        if name in vars(torch.cuda.memory):  # it holds the C function under its own name
            patches.replace(torch.cuda.memory, name, function)


@contextlib.contextmanager
def settled(gpu: GPU) -> Iterator[CachingAllocator]:
    """A GPU's allocator with every free carried out, which nobody else changes meanwhile."""
    with gpu.lock:
        yield gpu.settled()


class Pools:
    """The C functions. A device is an index, a pool its two numbers."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def begin(self, device: int, id: tuple[int, int]) -> None:
        """This thread allocates in the pool from now on."""
        with settled(self.machine.gpu(device)) as allocator:
            allocator.enter_pool(tuple(id))

    def end(self, device: int, id: tuple[int, int]) -> None:
        """And no longer."""
        with settled(self.machine.gpu(device)) as allocator:
            allocator.private.end(tuple(id))

    def release(self, device: int, id: tuple[int, int]) -> None:
        """One fewer holds it."""
        with settled(self.machine.gpu(device)) as allocator:
            allocator.private.let_go(tuple(id))


class MemPool:
    """torch.cuda.MemPool on the current GPU of `machine`, which `install` sets."""

    machine: Machine
    _gpu = None  # until it is made

    def __init__(self, allocator=None, use_on_oom: bool = False, no_split: bool = False, **others):
        if allocator is not None or use_on_oom or others:
            raise NotImplementedError(
                "of torch.cuda.MemPool, virtual GPUs model no_split alone: leave allocator, use_on_oom and the others out"
            )
        gpu, self.id = self.machine.gpu(None), new_id()
        self.allocator, self.device = None, gpu.index
        with settled(gpu) as memory:
            memory.hold_pool(self.id, no_split)
        self._gpu = gpu

    def use_count(self) -> int:
        """Who holds it."""
        return self._gpu.memory.private.known[self.id].uses

    def snapshot(self, include_traces: bool = True) -> list[dict]:
        """Its segments."""
        return _compat.memory_snapshot((*self.id, include_traces))["segments"]

    def __del__(self):
        if self._gpu is not None:
            self._gpu.drop_pool(self.id)
