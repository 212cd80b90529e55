"""What operations, process groups, streams and the allocator do, told to the detector; turned on and off."""

import functools
import re

import torch

from virtualgpu import _compat
from virtualgpu.engine.dispatch import Dispatch
from virtualgpu.engine.factories import Factories
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import EMPTY, RESIZING, Operation
from virtualgpu.engine.storage import PLAIN_TYPES, gpu_of, is_pinned
from virtualgpu.engine.timing import Timing
from virtualgpu.memory.blocks import Addresses
from virtualgpu.sanitizer.detector import HOST, Detector, Work
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.streams import Queue
from virtualgpu.torch_api.patches import Patches
from virtualgpu.torch_api.tensor import TensorPatches

# -- Methods that are replaced: they work as before, and the detector is told.


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


def instead(patches: Patches, machine: Machine, owner, name: str):
    """Replace a method by the function that is decorated, which gets the original before its arguments; not on other machines."""
    original = getattr(owner, name)

    def decorate(function):
        @functools.wraps(original)
        def method(subject, *args, **kwargs):
            __tracebackhide__ = True
            if subject.machine is not machine:
                return original(subject, *args, **kwargs)
            return function(original, subject, *args, **kwargs)

        patches.replace(owner, name, method)

    return decorate


# -- What each operation reads and writes, told to the detector: kernels, copies, and what the host does with tensors of its own.

# They make a tensor like another one, whose numbers they do not read (torch.cuda._sanitizer has the same rule)
LIKE = re.compile("(new_.*|.*_like)$")
READ_BY_HOST = ("numpy", "tolist", "__repr__", "__dlpack__")
# Of each operation: (argument, is it written?); "" for one that is not touched
_uses: dict[Operation, list[tuple[str, bool]]] = {}


def _dispatch(machine: Machine, patches: Patches, detector: Detector) -> None:
    @instead(patches, machine, Dispatch, "_work")
    def work(run, dispatch, op, args, kwargs, tensors, gpu):
        __tracebackhide__ = True
        if gpu is None:
            for tensor, name, writes in _touched(op, args, kwargs):
                detector.host(_name(op), tensor, writes, name)
            return run(dispatch, op, args, kwargs, tensors, gpu)
        begun = detector.work(_name(op))
        if op.copies and isinstance(args[1], torch.Tensor):
            _copy(detector, begun, args[1], args[0])
        else:
            for tensor, name, writes in _touched(op, args, kwargs):
                if gpu_of(tensor) is None:  # a number, or indices: the host reads them
                    detector.host(_name(op), tensor, writes, name)
                else:
                    detector.on_gpu(tensor, begun, name, writes)
        out = run(dispatch, op, args, kwargs, tensors, gpu)
        if op.new and op.name not in EMPTY:
            _made(detector, begun, op, out)
        return out

    @instead(patches, machine, Timing, "book")
    def book(book, timing, kernel, args, read, made, gpu):
        __tracebackhide__ = True
        begun = detector.work(kernel.name)
        for tensor in read:
            detector.on_gpu(tensor, begun, "", False)
        book(timing, kernel, args, read, made, gpu)
        for tensor in made:
            detector.on_gpu(tensor, begun, "", True)


def _factories(machine: Machine, patches: Patches, detector: Detector) -> None:
    @instead(patches, machine, Factories, "make")
    def made(make, factories, op, args, kwargs):
        out = make(factories, op, args, kwargs)
        if op.kernel and isinstance(out, torch.Tensor):
            detector.on_gpu(out, detector.work(_name(op)), "out", True)
        return out

    @instead(patches, machine, Factories, "make_like")
    def made_like(make_like, factories, op, args, kwargs, tensors, source):
        __tracebackhide__ = True
        begun = detector.work(_name(op))
        if op.converts and source is not None:
            detector.on_gpu(tensors[0], begun, "self", False)
        elif op.converts:
            detector.host(_name(op), tensors[0], False, "self")
        out = make_like(factories, op, args, kwargs, tensors, source)
        target = gpu_of(out)
        if target is not None and op.kernel:
            detector.on_gpu(out, begun, "out", True)
        if op.converts and target is not source and kwargs.get("non_blocking"):
            _in_background(detector, begun, tensors[0], out)
        return out


def _copies(machine: Machine, patches: Patches, detector: Detector) -> None:
    @instead(patches, machine, TensorPatches, "carry")
    def carried(carry, patched, tensor, target, wait, **changes):
        __tracebackhide__ = True
        begun, source = detector.work("copy (Tensor.to)"), gpu_of(tensor)
        if source is not None and target is not None and source is not target:
            detector.met(detector.clock.current(source.index), detector.clock.current(target.index))
        if source is not None:
            detector.on_gpu(tensor, begun, "self", False)
        elif is_pinned(tensor) and target is not None:
            begun.touch(tensor, "self", False, detector.clock.current(target.index))
        copy = carry(patched, tensor, target, wait, **changes)
        if target is not None:
            detector.on_gpu(copy, begun, "out", True)
            if source is not None and source is not target:
                detector.met(detector.clock.current(source.index), detector.clock.current(target.index))
        elif source is not None and not wait:
            begun.touch(copy, "out", True, detector.clock.current(source.index))
        return copy


def _reads(machine: Machine, patches: Patches, detector: Detector) -> None:
    def reader(name: str):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            __tracebackhide__ = True
            if type(tensor) in PLAIN_TYPES and not machine.local.bypass and not machine.closed:
                what = f"Tensor.{name}"
                if gpu_of(tensor) is None:
                    detector.host(what, tensor)
                else:
                    detector.on_gpu(tensor, detector.work(what), "", False)
            return original(tensor, *args, **kwargs)

        return read

    for name in READ_BY_HOST:
        patches.replace(torch.Tensor, name, reader(name))


def _copy(detector: Detector, begun: Work, source: torch.Tensor, target: torch.Tensor) -> None:
    """copy_: on the stream of the GPU; between two GPUs on those of both. The host's side counts where it is pinned."""
    here, there = gpu_of(source), gpu_of(target)
    current = detector.clock.current
    if here is not None and there is not None and here is not there:
        detector.met(current(here.index), current(there.index))
    for tensor, name, writes in ((source, "src", False), (target, "self", True)):
        if gpu_of(tensor) is not None:
            detector.on_gpu(tensor, begun, name, writes)
        elif is_pinned(tensor):
            begun.touch(tensor, name, writes, current((here or there).index))


def _in_background(detector: Detector, begun: Work, source: torch.Tensor, out: torch.Tensor) -> None:
    """The host's side of a copy for which the host does not wait."""
    here, there = gpu_of(source), gpu_of(out)
    if here is None and there is not None and is_pinned(source):
        begun.touch(source, "self", False, detector.clock.current(there.index))
    elif there is None and here is not None:
        begun.touch(out, "out", True, detector.clock.current(here.index))


def _made(detector: Detector, begun: Work, op: Operation, out) -> None:
    """New tensors among the results are written."""
    results = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, (list, tuple)) else []
    for index, result in enumerate(results):
        if index < len(op.returns) and op.returns[index] is not None:
            continue
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                detector.on_gpu(tensor, begun, "out", True)


def _touched(op: Operation, args, kwargs):
    """(tensor, argument, is it written?) of each tensor that the operation reads or writes."""
    uses = _uses.get(op)
    if uses is None:
        uses = _uses[op] = _uses_of(op)
    for (name, writes), value in zip(uses, args, strict=False):
        if name:
            yield from _tensors(value, name, writes)
    for key, value in kwargs.items():
        for name, writes in uses:
            if name == key:
                yield from _tensors(value, name, writes)


def _uses_of(op: Operation) -> list[tuple[str, bool]]:
    untouched = op.name in EMPTY or op.name in RESIZING
    reads = not (op.write_only or LIKE.match(op.name))
    uses = []
    for argument in _compat.schema(op.func).arguments:
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        touched = not untouched and (writes or (reads and alias is None))
        uses.append((argument.name if touched else "", writes))
    return uses


def _tensors(value, name: str, writes: bool):
    if isinstance(value, torch.Tensor):
        yield value, name, writes
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item, name, writes


def _name(op: Operation) -> str:
    return op.func.name()


# -- What process groups do with tensors, told to the detector: asynchronous work runs on a stream of its own, until wait().


STATE = "_virtual_state"  # of a work: what is done when it is


def _collectives(machine: Machine, patches: Patches, detector: Detector) -> None:
    """Report collectives and messages; nothing where PyTorch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return
    from virtualgpu.distributed.communicator import Communicator, VirtualWork
    from virtualgpu.distributed.message_log import RECV
    from virtualgpu.distributed.p2p import Exchange, Messages

    clock, order = machine.clock, detector.order
    join = VirtualWork.join

    def collective(work, kind: str, pairs, asynchronous: bool) -> None:
        queue, begun = work.stream, detector.work(kind)
        detector.joined(queue, [clock.current(work.gpu.index)])
        for outputs, inputs in pairs:
            for tensor in inputs:
                begun.touch(tensor, "input", False, queue)
            for tensor in outputs:
                begun.touch(tensor, "output", True, queue)
        _remember(work, queue)
        if kind == "barrier" and not asynchronous:
            order.wait(HOST, order.state(queue))

    @instead(patches, machine, Communicator, "start")
    def started(start, of, call, gpu, asynchronous):
        __tracebackhide__ = True
        pairs = list(call.pairs)  # a work that is done lets go of them
        work = start(of, call, gpu, asynchronous)
        collective(work, call.kind, pairs, asynchronous)
        return work

    def messages(_, of, exchange) -> None:
        if of.communicator.machine is not machine:
            return
        queue, begun = exchange.stream, detector.work("a message")
        detector.joined(queue, [clock.current(exchange.gpu.index)])
        for way, peer, tensor in exchange.messages:
            begun.operation = ("recv from" if way == RECV else "send to") + f" rank {of.communicator.ranks[peer]}"
            begun.touch(tensor, "tensor", way == RECV, queue)
        _remember(exchange, queue)

    def _remember(work, queue: Queue) -> None:
        with detector.lock:
            setattr(work, STATE, order.state(queue))

    def waits(work) -> None:
        """The current stream waits for it; after a barrier the host does."""
        with detector.lock:
            order.wait(clock.current(work.gpu.index), getattr(work, STATE, {}))
            if getattr(getattr(work, "call", None), "kind", "") == "barrier":
                order.wait(HOST, getattr(work, STATE, {}))

    def join_and_tell(work):
        waits(work)  # before what is done with the work's future
        return join(work)

    def asked(over, work) -> None:
        if over:
            with detector.lock:
                order.wait(HOST, getattr(work, STATE, {}))

    after(patches, Messages, "start", messages)
    patches.replace(VirtualWork, "join", join_and_tell)
    after(patches, Exchange, "wait", lambda _, work, *args: waits(work))
    for kind in (VirtualWork, Exchange):
        after(patches, kind, "is_completed", asked)


# -- What streams, events, the clock and the allocator do.


def _streams(machine: Machine, patches: Patches, detector: Detector) -> None:
    clock, Stream, Event = machine.clock, torch.cuda.Stream, torch.cuda.Event

    def queue_of(stream) -> Queue:
        if stream is None:
            return clock.current(torch.cuda.current_device())
        return clock.stream(stream.device_index, stream.stream_id)

    def if_recorded(report):
        return lambda out, event, *args: event.time is not None and report(event, *args)

    after(patches, Event, "record", lambda _, event, stream=None: detector.recorded(event, queue_of(stream)))
    after(patches, Event, "wait", if_recorded(lambda event, stream=None: detector.waited(event, queue_of(stream))))
    after(patches, Event, "synchronize", if_recorded(detector.event_done))
    after(patches, Event, "query", lambda over, event: detector.event_done(event) if over else None)
    after(patches, Stream, "query", lambda over, stream: detector.stream_done(stream._queue) if over else None)
    after(patches, Stream, "wait_stream", lambda _, one, other: detector.joined(queue_of(one), [queue_of(other)]))


def _clock(machine: Machine, patches: Patches, detector: Detector) -> None:
    clock = machine.clock

    def reported(name: str, report) -> None:
        after(patches, Clock, name, lambda out, its, *args: its is clock and report(out, *args))

    reported("wait", lambda _, gpu=None: detector.device_done(gpu))
    reported("wait_for", lambda _, queue, aloud=True: detector.stream_done(queue))
    reported("between", lambda _, one, other, seconds: detector.met(clock.current(one), clock.current(other)))

    enter, leave = Clock._enter_node, Clock._leave_backward

    def current(streams: dict[int, Queue]) -> list[Queue]:
        return [streams.get(gpu) or queue for gpu, queue in enumerate(clock.default)]

    def enter_node(its, local) -> None:
        if its is not clock:
            return enter(its, local)
        first = not hasattr(local, "passed")
        before, local.passed = (None if first else local.node), True
        if first:
            detector.entered_node(current(local.outside))
        enter(its, local)
        if first or local.node != before:
            detector.entered_node(list(local.streams.values()) or clock.default)

    def leave_backward(its, local) -> None:
        leave(its, local)
        if its is clock and hasattr(local, "passed"):
            del local.passed
            detector.left_backward(current(local.streams))

    patches.replace(Clock, "_enter_node", enter_node)
    patches.replace(Clock, "_leave_backward", leave_backward)


def _memory(machine: Machine, patches: Patches, detector: Detector) -> None:
    @instead(patches, machine, GPU, "malloc")
    def malloc(malloc, gpu, nbytes: int):
        __tracebackhide__ = True
        with gpu.lock:
            block = malloc(gpu, nbytes)
            if block is not None:
                detector.allocated(gpu, block)
        return block

    @instead(patches, machine, GPU, "free")
    def free(free, gpu, block) -> None:
        detector.freed(gpu, block)
        free(gpu, block)

    after(patches, Addresses, "give_back", lambda _, addresses, *range_: detector.given_back(addresses.device, *range_))


# -- Races looked for, on one machine's virtual GPUs: on and off.


def install_detector(machine: Machine, patches: Patches) -> Detector:
    """Look for races from now on, until `patches` are restored. What is under way already is taken to be done."""
    detector = Detector(machine)
    for report in (_streams, _clock, _memory, _dispatch, _factories, _copies, _reads, _collectives):
        report(machine, patches, detector)
    return detector
