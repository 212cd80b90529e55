"""Operations that make a tensor: from no other one (zeros), or with a `device` of their own (zeros_like, the copies of C++)."""

import torch

from virtualgpu import _compat
from virtualgpu.engine import copies, values
from virtualgpu.engine.allocation import Allocation, MadeByCpp, gpu_of, is_pinned, label, made_by_cpp, pin
from virtualgpu.engine.dry import DryRun
from virtualgpu.engine.eager import Eager
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.on_meta import is_on_meta, put_on_meta
from virtualgpu.engine.operations import EMPTY, Operation
from virtualgpu.engine.placement import Placement, place_output
from virtualgpu.engine.timing import Timing

CPU, META = torch.device("cpu"), torch.device("meta")


class Factories:
    """Makes tensors on the GPUs of one machine, or on the CPU."""

    def __init__(self, machine: Machine, dry: DryRun, eager: Eager, timing: Timing, placement: Placement):
        self.machine, self.dry, self.eager, self.timing, self.placement = machine, dry, eager, timing, placement

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
                values.name_small([out], op.name)
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
            gpu = self.placement.last if leaf is None else gpu_of(leaf)
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
        if op.waits is not None and op.waits(args, kwargs):  # linspace: numbers that are read of tensors
            self.machine.clock.wait_for(self.machine.clock.current(source.index))
        if op.converts and target is not source:
            pinned = bool(kwargs.get("pin_memory")) or is_pinned(tensors[0])
            copies.charge(machine, out, tensors[0], (target, source), bool(kwargs.get("non_blocking")), pinned)
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
