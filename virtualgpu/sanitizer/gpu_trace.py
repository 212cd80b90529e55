"""PyTorch's own detector of races (TORCH_CUDA_SANITIZER=1, torch.cuda._sanitizer) is told what CUDA would tell it.

It listens to `torch.cuda._gpu_trace`: C++ reports there when streams and events are made, recorded and waited for, when memory is
allocated and freed, and when the host waits (c10/core/impl/GPUTrace.h and who includes it: c10/cuda/CUDACachingAllocator.cpp,
CUDAFunctions.h, CUDAStream.cpp, ATen/cuda/CUDAEvent.h). Where C++ makes an event for the purpose (wait_stream, a copy between two
GPUs, autograd), one is made up here.
"""

import itertools
import weakref

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.sanitizer import waits
from virtualgpu.timing.streams import Queue
from virtualgpu.torch_api.registry import Patches
from virtualgpu.torch_api.streams import handle
from virtualgpu.torch_api.tensor import TensorPatches

MADE_UP = 1 << 44  # numbers of events from here on have no object


def install(machine: Machine, patches: Patches) -> None:
    """From the moment on at which somebody listens."""
    begun = False
    activate = _compat.activate_gpu_trace

    def begin() -> None:
        nonlocal begun
        if not begun:
            begun = True
            waits.install(machine, patches, Reporter())
            _copies(machine, patches)

    def activated() -> None:
        activate()
        begin()

    patches.replace(_compat.C, "_activate_gpu_trace", activated)
    if _compat.gpu_trace_has_listeners():
        begin()


class Reporter:
    """Fires the callbacks of torch.cuda._gpu_trace; a listener of `waits`."""

    def __init__(self):
        self.trace = _compat.gpu_trace()
        self.numbers = itertools.count(MADE_UP)
        self.known: weakref.WeakSet = weakref.WeakSet()
        self._passed: list[Queue] = []  # by the backward pass

    def recorded(self, event, queue: Queue) -> None:
        """An event is made in CUDA when it is first recorded."""
        number = event.cuda_event
        if event not in self.known:
            self.known.add(event)
            self.trace.EventCreationCallbacks.fire_callbacks(number)
            weakref.finalize(event, self.trace.EventDeletionCallbacks.fire_callbacks, number).atexit = False
        self.trace.EventRecordCallbacks.fire_callbacks(number, handle(queue))

    def waited(self, event, queue: Queue) -> None:
        """A stream waits for an event."""
        self.trace.EventWaitCallbacks.fire_callbacks(event.cuda_event, handle(queue))

    def joined(self, queue: Queue, others: list[Queue]) -> None:
        """A stream waits for all that others have been given so far, by an event of each."""
        for other in others:
            if other is not queue:
                number = next(self.numbers)
                self.trace.EventCreationCallbacks.fire_callbacks(number)
                self.trace.EventRecordCallbacks.fire_callbacks(number, handle(other))
                self.trace.EventWaitCallbacks.fire_callbacks(number, handle(queue))
                self.trace.EventDeletionCallbacks.fire_callbacks(number)

    def met(self, one: Queue, other: Queue) -> None:
        """A copy between two GPUs: each stream waits for the other."""
        self.joined(one, [other])
        self.joined(other, [one])

    def event_done(self, event) -> None:
        """The host has waited for an event."""
        self.trace.EventSynchronizationCallbacks.fire_callbacks(event.cuda_event)

    def stream_done(self, queue: Queue) -> None:
        """The host has waited for a stream."""
        self.trace.StreamSynchronizationCallbacks.fire_callbacks(handle(queue))

    def device_done(self, gpu: int | None) -> None:
        """The host has waited for a GPU."""
        self.trace.DeviceSynchronizationCallbacks.fire_callbacks()

    def seen_done(self, event) -> None:
        """CUDA reports no query."""

    stream_seen_done = seen_done

    def made(self, queue: Queue) -> None:
        """A stream was made."""
        self.trace.StreamCreationCallbacks.fire_callbacks(handle(queue))

    def allocated(self, gpu, block) -> None:
        """A block was handed out."""
        self.trace.MemoryAllocationCallbacks.fire_callbacks(block.address)

    def freed(self, gpu, block) -> None:
        """A tensor goes."""
        self.trace.MemoryDeallocationCallbacks.fire_callbacks(block.address)

    def entered_node(self, queues: list[Queue]) -> None:
        """Autograd lets the streams of a node wait for those before it."""
        for queue in queues:
            self.joined(queue, self._passed)
        self._passed += [queue for queue in queues if queue not in self._passed]

    def left_backward(self, current: list[Queue]) -> None:
        """backward() returns."""
        for queue in current:
            self.joined(queue, self._passed)
        self._passed.clear()


class _Copy(_compat.Copy):
    """A copy to another place, as the operation that it is on a GPU."""

    def __init__(self, carry):
        self.carry = carry

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.carry(tensor)


def _copies(machine: Machine, patches: Patches) -> None:
    """Tensor.to and its kind do not come to dispatch modes here: show them to PyTorch's detector, which is one."""
    carry = TensorPatches.carry

    def carry_and_tell(patched, tensor, target, wait, **changes):
        mode = _compat.cuda_sanitizer_mode()
        if mode is None or patched.machine is not machine:
            return carry(patched, tensor, target, wait, **changes)
        copy = _Copy(lambda tensor: carry(patched, tensor, target, wait, **changes))
        return mode.__torch_dispatch__(copy, (), (tensor,))

    patches.replace(TensorPatches, "carry", carry_and_tell)
