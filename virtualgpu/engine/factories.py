"""Operations that make a tensor, from no other one or on a `device` of their own, and copies from one place to another."""

from typing import NamedTuple

import torch
from torch import Tensor

from virtualgpu import _compat
from virtualgpu.engine import values
from virtualgpu.engine.dry_run import is_on_meta, put_on_meta
from virtualgpu.engine.frames import MadeByCpp
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import EMPTY, Operation
from virtualgpu.engine.storage import Allocation, gpu_of, is_pinned, label, made_by_cpp, pin, place_output
from virtualgpu.timing.memory_bound import ELEMENTWISE

# -- Copies from one place to another: what they send, and what they need on a GPU beside (aten/src/ATen/native/cuda/Copy.cu).
#
# Memory is sent as it lies: of one type, in one order, without gaps. What is not so is made so before, or put right afterwards, on the side
# where types are converted: the host's, or, for a copy that the host does not wait for, the GPU's. A kernel there works through a tensor that
# lives for the length of the copy. Between GPUs with peer access one kernel does it all.


class Copy(NamedTuple):
    """sent: bytes from place to place. before, after: bytes of a tensor that is sent instead of the source, or into which instead of the target; 0
    if there is none."""

    sent: int
    before: int = 0
    after: int = 0


def of(target: Tensor, source: Tensor, converts_first: bool) -> Copy:
    """Of target.copy_(source). converts_first: types are converted where the source is. source may be smaller, as copy_ expands it."""
    count = target.numel()
    if target.dtype is source.dtype and _lie_alike(target, source):
        return Copy(target.nbytes)
    sent = count * (target if converts_first else source).dtype.itemsize
    same = target.dtype is source.dtype
    as_it_lies = source.is_contiguous() and source.numel() == count and (same or not converts_first)
    into_it = target.is_contiguous() and (same or converts_first)
    return Copy(sent, 0 if as_it_lies else sent, 0 if into_it else sent)


def charge(machine: Machine, target: Tensor, source: Tensor, places: tuple, non_blocking: bool, pinned: bool) -> None:
    """The time and the memory of target.copy_(source). places: the GPU of the target and that of the source, None for the host, and not the same.
    pinned: is the host's memory? Raises torch.OutOfMemoryError."""
    to, came = places
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (target, source)):
        machine.charge_copy(came, to, source.numel() * source.element_size(), non_blocking, pinned)
        return
    if to is not None and came is not None and came.spec.peer_access and to.spec.peer_access:
        machine.charge_copy(came, to, target.nbytes)
        return
    copy = of(target, source, (came is not None) == non_blocking)
    if copy.before and came is not None:
        came.lend([copy.before])
        _launch(machine, came, copy.before, source)
    if copy.after and to is not None:
        to.lend([copy.after])
    machine.charge_copy(came, to, copy.sent, non_blocking, pinned)
    if copy.after and to is not None:
        _launch(machine, to, copy.after, target)


def _launch(machine: Machine, gpu: GPU, nbytes: int, tensor: Tensor) -> None:
    """A kernel that reads `tensor` and writes so many bytes, or the other way round."""
    machine.clock.launch(gpu.index, gpu.kernels.moving(nbytes + tensor.nbytes, ELEMENTWISE), "copy_")


def _lie_alike(target: Tensor, source: Tensor) -> bool:
    if target.shape != source.shape:
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    return target.stride() == source.stride() and torch.ops.aten.is_non_overlapping_and_dense(target)


# -- Operations that make a tensor: from no other one (zeros), or with a `device` of their own (zeros_like, the copies of C++).


CPU, META = torch.device("cpu"), torch.device("meta")


class Factories:
    """Makes tensors on the GPUs of one machine, or on the CPU."""

    def __init__(self, dispatch):
        """dispatch: the thread's `Dispatch`, which hands such operations over."""
        self.dispatch, self.machine = dispatch, dispatch.machine
        self.dry, self.eager, self.timing = dispatch.dry, dispatch.eager, dispatch.timing

    def make(self, op: Operation, args, kwargs):
        """A tensor from no other: on the GPU or the CPU that `device` says."""
        machine, device = self.machine, kwargs.get("device")
        by_python, pinned = "pin_memory" in kwargs, kwargs.get("pin_memory")
        if _compat.fake_mode_is_on():
            return op.func(*args, **kwargs)
        if device is not None and self._is_elsewhere(device, by_python):
            return self._made_elsewhere(op.func(*args, **kwargs))
        gpu = machine.gpu(device) if device is not None and device.type == "cuda" else None
        if gpu is None and not by_python and machine.local.target is not None:
            if device is None:
                return op.func(*args, **kwargs)  # C++ computes with it on the host, in a dry run, too
            gpu = machine.local.target
        beside_numbers = op.name == "scalar_tensor" and device == CPU  # what has none says meta to C++
        if machine.dry and not by_python and (beside_numbers or (machine.local.counts and op.name in EMPTY)):
            out = op.func(*args, **kwargs)
            label(out, MadeByCpp())
            return out
        if op.generator:
            self.eager.check_generator(args, kwargs, gpu)
        options = {**kwargs, "device": META if machine.dry else CPU}
        if pinned:
            options["pin_memory"] = False
            if gpu is not None:
                raise RuntimeError("Only dense CPU tensors can be pinned")
        if gpu is not None and not machine.dry:
            self.eager.require_for_factory(op, args, kwargs, gpu)
        if op.unsupported is not None and gpu is not None:
            op.unsupported(*args, **kwargs)
        if machine.dry:
            out = self.dry.run(op, args, options, [], gpu)
            number = op.name == "scalar_tensor"  # x[1] = 5 makes one in C++, up to PyTorch 2.11
            if (gpu is None and (by_python or number)) or (by_python and values.is_kept(out) and not op.random):
                values.propagate_factory(op, args, {**options, "device": CPU}, out)
            else:
                values.name(filter(values.is_kept, [out]), op.name)
        elif gpu is None:
            out = op.on_cpu(*args, **options)
        else:
            out, _ = self.eager.run(op, args, options, [], gpu)
        if gpu is not None:
            place_output(op, out, gpu)
            self.timing.write(op, out, gpu)
        elif pinned:
            pin(out)
        elif not by_python:
            self._label_made_by_cpp(op, out)
        return out

    def _label_made_by_cpp(self, op: Operation, out: torch.Tensor) -> None:
        """In a backward pass it may become a gradient without meeting any other: it belongs where the pass is."""
        if _compat.graph_task() != -1 and op.name != "scalar_tensor":
            node = _compat.current_node()
            by_python = isinstance(
                node, torch.autograd.function.BackwardCFunction
            )  # then it is of an output, not an input
            leaf = None if by_python else next(_leaves(node), None)
            gpu = self.dispatch.last if leaf is None else gpu_of(leaf)
            if gpu is not None:
                if gpu.machine is self.machine:
                    label(out, Allocation(gpu, out.untyped_storage().nbytes(), inferred=True))
                return
        label(out, MadeByCpp())

    def make_like(self, op: Operation, args, kwargs, tensors, source: GPU | None):
        """A tensor from another one, with a `device` of its own: zeros_like(x, device=...), and copies that C++ asks for."""
        machine, device = self.machine, kwargs.get("device") or (CPU if source is None else source.device)
        own = op.converts and made_by_cpp(tensors[0])  # what C++ has made for the call, it moves
        from_options = own or ("layout" in kwargs if op.converts else "pin_memory" not in kwargs)
        if self._is_elsewhere(device, not from_options):
            out = op.func(
                *args, **kwargs
            )  # what C++ converts may say meta as well; what Python does, Tensor.to has marked
            return out if op.converts and not is_on_meta(tensors[0]) else self._made_elsewhere(out)
        target = machine.gpu(device) if device.type == "cuda" else None
        if source is not None and target is None and from_options:
            target = source  # options that C++ copied from a GPU tensor: the backward of a cast, say
        options = {**kwargs, "device": META if machine.dry else CPU}
        if options.pop("pin_memory", None):
            if target is not None:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            options["pin_memory"] = False
        if op.converts and target is source and (machine.dry or not _compat.is_really_meta(tensors[0])):
            del options["device"]
        if machine.dry:
            out = self.dry.run(op, args, options, tensors, target)
            (values.propagate if target is None else values.propagate_on_gpu)(op, args, options, tensors, out)
        elif target is None:
            out = op.on_cpu(*args, **options)
        else:
            out, _ = self.eager.run(op, args, options, tensors, target)
        if target is not None:
            place_output(op, out, target)
        elif own:
            label(out, MadeByCpp())
        if (
            source is not None and op.waits is not None and op.waits(args, kwargs)
        ):  # linspace: numbers that are read of tensors
            self.machine.clock.wait_for(self.machine.clock.current(source.index))
        if op.converts and target is not source:
            pinned = bool(kwargs.get("pin_memory")) or is_pinned(tensors[0])
            charge(machine, out, tensors[0], (target, source), bool(kwargs.get("non_blocking")), pinned)
        elif target is not None and op.converts:
            self.timing.launch(op, args, options, [*tensors, out], out, target)
        elif target is not None:
            self.timing.write(op, out, target)
        if kwargs.get("pin_memory") and target is None:
            pin(out)
        return out

    def _made_elsewhere(self, out: torch.Tensor) -> torch.Tensor:
        return put_on_meta(out) if self.machine.dry and _compat.is_really_meta(out) else out

    def _is_elsewhere(self, device: torch.device, by_python: bool) -> bool:
        """Neither the CPU nor a GPU? What C++ copies from a tensor of a dry run says meta."""
        return device.type not in ("cpu", "cuda") and (by_python or not (self.machine.dry and device.type == "meta"))


def _leaves(node):
    """The tensors whose gradients this node of the graph makes, where they are leaves."""
    for next_node, _ in node.next_functions if node is not None else ():
        if hasattr(next_node, "variable"):
            yield next_node.variable
