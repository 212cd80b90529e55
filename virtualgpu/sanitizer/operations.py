"""What each operation reads and writes, told to the detector: kernels, copies, and what the host does with tensors of its own."""

import re

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import PLAIN_TYPES, gpu_of, is_pinned
from virtualgpu.engine.dispatch import Dispatch
from virtualgpu.engine.factories import Factories
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.operations import EMPTY, RESIZING, Operation
from virtualgpu.engine.timing import Timing
from virtualgpu.sanitizer.detector import Detector, Work
from virtualgpu.torch_api.registry import Patches
from virtualgpu.torch_api.tensor import TensorPatches

# They make a tensor like another one, whose numbers they do not read (torch.cuda._sanitizer has the same rule)
LIKE = re.compile("(new_.*|.*_like)$")
READ_BY_HOST = ("numpy", "tolist", "__repr__", "__dlpack__")
_uses: dict[
    Operation, list[tuple[str, bool]]
] = {}  # of each: (argument, is it written?); "" for one that is not touched


def install(machine: Machine, patches: Patches, detector: Detector) -> None:
    """Replace the methods of the engine that carry operations out by such as tell the detector before and after."""
    _dispatch(machine, patches, detector)
    _factories(machine, patches, detector)
    _copies(machine, patches, detector)
    _reads(machine, patches, detector)


def _dispatch(machine: Machine, patches: Patches, detector: Detector) -> None:
    run, book = Dispatch._work, Timing.book

    def work(dispatch, op, args, kwargs, tensors, gpu):
        __tracebackhide__ = True
        if dispatch.machine is not machine:
            return run(dispatch, op, args, kwargs, tensors, gpu)
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

    def book_and_tell(timing, kernel, args, read, made, gpu):
        __tracebackhide__ = True
        begun = detector.work(kernel.name)
        if timing.machine is machine:
            for tensor in read:
                detector.on_gpu(tensor, begun, "", False)
        book(timing, kernel, args, read, made, gpu)
        if timing.machine is machine:
            for tensor in made:
                detector.on_gpu(tensor, begun, "", True)

    patches.replace(Dispatch, "_work", work)
    patches.replace(Timing, "book", book_and_tell)


def _factories(machine: Machine, patches: Patches, detector: Detector) -> None:
    make, make_like = Factories.make, Factories.make_like

    def made(factories, op, args, kwargs):
        out = make(factories, op, args, kwargs)
        if factories.machine is machine and op.kernel and isinstance(out, torch.Tensor):
            detector.on_gpu(out, detector.work(_name(op)), "out", True)
        return out

    def made_like(factories, op, args, kwargs, tensors, source):
        __tracebackhide__ = True
        if factories.machine is not machine:
            return make_like(factories, op, args, kwargs, tensors, source)
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

    patches.replace(Factories, "make", made)
    patches.replace(Factories, "make_like", made_like)


def _copies(machine: Machine, patches: Patches, detector: Detector) -> None:
    carry = TensorPatches.carry

    def carry_and_tell(patched, tensor, target, wait, **changes):
        __tracebackhide__ = True
        if patched.machine is not machine:
            return carry(patched, tensor, target, wait, **changes)
        begun, source = detector.work("copy (Tensor.to)"), gpu_of(tensor)
        if source is not None and target is not None and source is not target:
            detector.met(detector.clock.current(source.index), detector.clock.current(target.index))
        if source is not None:
            detector.on_gpu(tensor, begun, "self", False)
        elif _pinned(tensor) and target is not None:
            begun.touch(tensor, "self", False, detector.clock.current(target.index))
        copy = carry(patched, tensor, target, wait, **changes)
        if target is not None:
            detector.on_gpu(copy, begun, "out", True)
            if source is not None and source is not target:
                detector.met(detector.clock.current(source.index), detector.clock.current(target.index))
        elif source is not None and not wait:
            begun.touch(copy, "out", True, detector.clock.current(source.index))
        return copy

    patches.replace(TensorPatches, "carry", carry_and_tell)


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
        elif _pinned(tensor):
            begun.touch(tensor, name, writes, current((here or there).index))


def _in_background(detector: Detector, begun: Work, source: torch.Tensor, out: torch.Tensor) -> None:
    """The host's side of a copy for which the host does not wait."""
    here, there = gpu_of(source), gpu_of(out)
    if here is None and there is not None and _pinned(source):
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


def _pinned(tensor: torch.Tensor) -> bool:
    return is_pinned(tensor)
