"""What streams, events, the clock and the allocator do, reported to a listener, as long as somebody listens.

A listener is a Detector. The methods of ours that are replaced here work as before; after
each, its listener is told.
"""

import functools

import torch

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.memory.addresses import Addresses
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.streams import Queue
from virtualgpu.torch_api.registry import Patches


def after(patches: Patches, owner, name: str, then) -> None:
    """Replace a method by one that also calls then(result, *args)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args, **kwargs):
        __tracebackhide__ = True
        out = original(*args, **kwargs)
        then(out, *args, **kwargs)
        return out

    patches.replace(owner, name, method)


def install(machine: Machine, patches: Patches, listener) -> None:
    """Report what this machine's streams, events, memory and clock do to `listener`."""
    _streams(machine, patches, listener)
    _clock(machine, patches, listener)
    _memory(machine, patches, listener)


def _streams(machine: Machine, patches: Patches, listener) -> None:
    clock, Stream, Event = machine.clock, torch.cuda.Stream, torch.cuda.Event

    def queue_of(stream) -> Queue:
        if stream is None:
            return clock.current(machine.gpu(None).index)
        return clock.stream(stream.device_index, stream.stream_id)

    def if_recorded(report):
        return lambda out, event, *args: event.time is not None and report(event, *args)

    after(patches, Event, "record", lambda _, event, stream=None: listener.recorded(event, queue_of(stream)))
    after(patches, Event, "wait", if_recorded(lambda event, stream=None: listener.waited(event, queue_of(stream))))
    after(patches, Event, "synchronize", if_recorded(listener.event_done))
    after(patches, Event, "query", lambda over, event: over and listener.seen_done(event))
    after(patches, Stream, "query", lambda over, stream: over and listener.stream_seen_done(stream._queue))
    after(patches, Stream, "wait_stream", lambda _, one, other: listener.joined(queue_of(one), [queue_of(other)]))


def _clock(machine: Machine, patches: Patches, listener) -> None:
    clock = machine.clock

    def reported(name: str, report) -> None:
        after(patches, Clock, name, lambda out, its, *args: its is clock and report(out, *args))

    reported("wait", lambda _, gpu=None: listener.device_done(gpu))
    reported("wait_for", lambda _, queue, aloud=True: listener.stream_done(queue))
    reported("between", lambda _, one, other, seconds: listener.met(clock.current(one), clock.current(other)))
    reported("new_stream", lambda queue, *_: listener.made(queue))

    enter, leave = Clock._enter_node, Clock._leave_backward

    def current(streams: dict[int, Queue]) -> list[Queue]:
        return [streams.get(gpu) or queue for gpu, queue in enumerate(clock.default)]

    def enter_node(its, local) -> None:
        if its is not clock:
            return enter(its, local)
        first = not hasattr(local, "passed")
        before, local.passed = (None if first else local.node), True
        if first:
            listener.entered_node(current(local.outside))
        enter(its, local)
        if first or local.node != before:
            listener.entered_node(list(local.streams.values()) or clock.default)

    def leave_backward(its, local) -> None:
        leave(its, local)
        if its is clock and hasattr(local, "passed"):
            del local.passed
            listener.left_backward(current(local.streams))

    patches.replace(Clock, "_enter_node", enter_node)
    patches.replace(Clock, "_leave_backward", leave_backward)


def _memory(machine: Machine, patches: Patches, listener) -> None:
    malloc, free, give_back = GPU.malloc, GPU.free, Addresses.give_back

    def reported_malloc(gpu, nbytes: int):
        __tracebackhide__ = True
        with gpu.lock:
            block = malloc(gpu, nbytes)
            if block is not None and gpu.machine is machine:
                listener.allocated(gpu, block)
        return block

    def reported_free(gpu, block) -> None:
        if gpu.machine is machine:
            listener.freed(gpu, block)
        free(gpu, block)

    def reported_give_back(addresses, first: int, size: int) -> None:
        give_back(addresses, first, size)
        listener.given_back(addresses.device, first, size)

    patches.replace(Addresses, "give_back", reported_give_back)
    patches.replace(GPU, "malloc", reported_malloc)
    patches.replace(GPU, "free", reported_free)
