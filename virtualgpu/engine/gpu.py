"""One virtual GPU: its memory, which every thread may ask for, and its place in the clock."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol
from uuid import UUID

import torch

from virtualgpu.environment import uuid
from virtualgpu.errors import CUDNN_HANDLE, cudnn_not_initialized
from virtualgpu.hardware.settings import DATASHEET, MachineSettings
from virtualgpu.hardware.specs import MIB, Spec
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.ledger import PLAYED_PID, Ledger
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.kernels import Kernels

# What a process's CUDA context takes of a GPU before its first tensor: 102 MiB on Colab's T4 (nvidia-smi, CUDA 12).
CONTEXT = 102 * MIB
# From capability 9.0 on, with the kernels that the first tensor loads (92 MiB of it): an H100, driver 580, CUDA 13, PyTorch 2.11,
# 2026-11-26. Not counted: 66 MiB of cuBLAS's kernels at the first product there, 492 MiB of NCCL's at the first collective.
CONTEXT_OF_HOPPER = 610 * MIB


class Owner(Protocol):
    """What a GPU asks of the machine that it is part of."""

    clock: Clock
    settings: MachineSettings


class GPU:
    """One virtual GPU: its spec, its memory, its place in the clock.

    index: CUDA's number of it. physical: the machine's, which CUDA_VISIBLE_DEVICES may have changed.
    """

    def __init__(self, index: int, spec: Spec, machine: Owner, physical: int | None = None):
        self.index, self.spec, self.machine = index, spec, machine
        self.physical = index if physical is None else physical
        self.device = torch.device("cuda", index)
        self.kernels = Kernels(spec, peak=machine.settings.clock == DATASHEET)
        # a GPU made small for a lesson keeps its memory for the lesson
        contexts = (CONTEXT_OF_HOPPER, CONTEXT) if spec.capability >= (9, 0) else (CONTEXT,)
        context = next((context for context in contexts if spec.memory > 8 * context), 0)
        self.lock = threading.RLock()
        self.memory = CachingAllocator(spec.memory, index, context, timeline=_Timeline(machine.clock, index))
        self.uuid = UUID(uuid(self.physical).removeprefix("GPU-"))
        self.cudnn = False  # has its handle
        self.workspaces: dict = {}  # of cuBLAS, that handles keep
        self.makes_workspace = False  # is what asks for memory now cuBLAS?
        self._freed: deque = deque()

    def share(self, ledger: Ledger) -> None:
        """From now on its memory is shared with the other processes that keep this ledger."""
        with self.lock:  # another thread's malloc asks both, or none
            note = functools.partial(self.note, ledger)
            self.memory.share(functools.partial(ledger.processes, self.physical), ledger.lock, note)

    def note(self, ledger: Ledger, memory: CachingAllocator) -> None:
        """Write down what this process holds of it."""
        held = memory.reserved + memory.context
        ledger.note(self.physical, held, memory.peak_allocated, memory.peak_reserved, memory.occupied)

    @contextlib.contextmanager
    def leaving(self, nbytes: int, container: bool = False) -> Iterator[None]:
        """In this block another process holds all that is free now but so many bytes. container: this one's pid is the host's."""
        before = self.memory.host_pid
        with self.lock:
            if container:
                self.memory.be_in_container(PLAYED_PID + 1)
            taken = max(0, self.settled().free_on_gpu - nbytes)
            self.memory.occupy(taken)
        try:
            yield
        finally:
            with self.lock:
                self.memory.be_in_container(before)
                self.memory.occupy(-taken)

    def malloc(self, nbytes: int):
        """A block of memory on the current stream. Raises torch.OutOfMemoryError as PyTorch would."""
        clock = self.machine.clock
        stream = clock.current(self.index).id if clock.multi else 0  # as `stream`, written out for speed
        with self.lock:
            while self._freed:
                self.memory.free(*self._freed.popleft())
            return self.memory.malloc(nbytes, stream)

    def malloc_workspace(self, nbytes: int):
        """As `malloc`, for cuBLAS."""
        with self.lock:
            self.makes_workspace = True
            try:
                return self.malloc(nbytes)
            finally:
                self.makes_workspace = False

    def lend_workspace(self, nbytes: int) -> None:
        """Memory for cuBLAS, for the length of one call."""
        stream = self.stream
        with self.lock:
            self._collect()
            self.makes_workspace = True
            try:
                self.memory.lend(nbytes, stream)
            finally:
                self.makes_workspace = False

    def lend(self, sizes: list[int], needed: bool = True) -> None:
        """Blocks of these bytes, all at once, for the length of one call. Where there is no room, raises torch.OutOfMemoryError, or, if
        they are not `needed`, goes without: cuDNN has kernels that take less."""
        blocks = []
        try:
            for nbytes in filter(None, sizes):  # 0 of the gradient of x[nothing]
                blocks.append(self.malloc(nbytes))  # noqa: PERF401: those before are given back where one fails
        except torch.OutOfMemoryError:
            if needed:
                raise
        finally:
            for block in blocks:
                self.free(block)

    @property
    def stream(self) -> int:
        """The id of the current stream."""
        clock = self.machine.clock
        return clock.current(self.index).id if clock.multi else 0

    def require(self, nbytes: int | list[int]) -> None:
        """Raises torch.OutOfMemoryError where a block of that size, or blocks of these, cannot be had; nothing is taken."""
        with self.lock:
            self._collect()
            self.memory.require(nbytes, self.machine.clock.current(self.index).id)

    def free(self, block) -> None:
        """Only noted here: a destructor may run in the middle of malloc. Streams that use the block are asked for their time now."""
        ends = None
        if block.streams:
            clock = self.machine.clock
            ends = {stream: clock.stream(self.index, stream).ready for stream in block.streams}
        history = self.memory.history
        self._freed.append((block, ends, history.gather(freeing=True) if history else None))

    def settled(self) -> CachingAllocator:
        """The allocator with every free carried out, for whoever reads figures."""
        with self.lock:
            self._collect()
        return self.memory

    @contextlib.contextmanager
    def only(self) -> Iterator[CachingAllocator]:
        """The same, which nobody else changes in this block."""
        with self.lock:
            yield self.settled()

    def use_cudnn(self) -> None:
        """The first convolution makes cuDNN's handle, which cannot use what PyTorch keeps reserved. Raises RuntimeError without room."""
        if self.settled().free_on_gpu < CUDNN_HANDLE:
            raise cudnn_not_initialized()
        self.cudnn = True

    def _collect(self) -> None:
        while self._freed:
            self.memory.free(*self._freed.popleft())

    def __repr__(self) -> str:
        return f"cuda:{self.index} ({self.spec.name}, virtual)"


class _Timeline:
    """What the allocator asks about time."""

    def __init__(self, clock: Clock, gpu: int):
        self.clock, self.gpu = clock, gpu

    def now(self) -> float:
        return self.clock.host

    def ready(self, stream: int) -> float:
        return self.clock.stream(self.gpu, stream).ready

    def wait_until(self, moment: float) -> None:
        self.clock.wait_until(moment)
