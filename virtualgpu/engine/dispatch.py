"""Every operation passes here: are its tensors on one GPU, is there room for its result, and how long does the GPU work on it?

A TorchDispatchMode sees operations below autograd, as the kernels of a GPU would: forward, backward and optimizer alike.
"""

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgpu import errors
from virtualgpu.engine.dry import DryRun, bound
from virtualgpu.engine.machine import GPU, Home, Machine, gpu_of, storage_of
from virtualgpu.engine.operations import MASKS, Operation, mismatch, tensors_of
from virtualgpu.simulation.costs import moved, rate

UNKNOWN = object()
# The home of a tensor that PyTorch's own C++ made for its use (the zeros of a gradient that is missing, say): options that it
# copied from a GPU tensor say CPU here. It belongs with whatever it meets. Factories called from Python are not among them.
ANYWHERE = SimpleNamespace(gpu=None, nbytes=0)


class Dispatch(TorchDispatchMode):
    """The mode of one thread. All of them share the machine, and what is known about operations."""

    operations: ClassVar[dict] = {}
    flops: ClassVar[dict] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not modelled, and guarding against it would cost a microsecond an operation

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.clock, self.local = machine, machine.clock, machine.local
        self.dry = DryRun(machine)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # IPython shows the reader's line, not ours
        try:
            return self._run(func, args, kwargs or {})
        except (RuntimeError, IndexError) as error:
            raise error.with_traceback(None) from error.__cause__  # PyTorch's error, for the line above

    def _run(self, func, args, kwargs):
        if self.local.bypass:
            return func(*args, **kwargs)
        op = self.operations.get(func)
        if op is None:
            op = self.operations[func] = Operation(func)
        if op.is_view:
            return func(*args, **kwargs)
        tensors = tensors_of(args, kwargs)
        gpu = self._device(op, args, tensors)
        waits = op.shape_from_values and (not op.indexes or any(t.dtype in MASKS for t in tensors[1:]))
        if waits and self.machine.dry:
            raise NotImplementedError(
                f"the shape of what {op.name} returns depends on values, and a dry run has none. Run this line outside dry_run()"
            )
        asserts = False
        if self.machine.dry:
            out = self.dry.run(op, args, kwargs, tensors, gpu)
        else:
            try:
                out = func(*args, **kwargs)
            except (IndexError, RuntimeError) as error:
                if gpu is None or not errors.in_kernel(error):
                    raise
                asserts, out = True, self._undefined(op, args, kwargs)
        if gpu is None:
            if op.new and type(out) is torch.Tensor and all(_is_anywhere(tensor) for tensor in tensors):
                out.untyped_storage()._virtual_home = ANYWHERE
            return out
        if type(out) is torch.Tensor:
            self._settle(op, out, gpu)
            tensors.append(out)
        elif isinstance(out, (tuple, list)):
            self._settle_all(op, args, out, gpu)
            tensors.extend(tensor for tensor in out if tensor is not None)
        if op.reads:
            self.clock.host_copy(gpu.index, gpu.spec.host.seconds(8), True, op.name)
        elif op.foreach:
            self._launch_foreach(op, args, tensors)
        elif op.copies and (crossing := self._crossing(args)):
            self.machine.travel(*crossing, args[1], wait=not (len(args) > 2 and args[2]))
        else:
            if op.write_only:
                tensors = tensors[:1]
            flops = 0 if op.formula is None else self._flops(op, args, kwargs, tensors, out)
            if op.convolves and not gpu.cudnn and torch.backends.cudnn.enabled:
                gpu.use_cudnn()
            seconds = gpu.spec.seconds(flops, moved(tensors), rate(op.func, flops, tensors))
            self.clock.launch(gpu.index, seconds, op.name)
            if waits:  # the host needs to know how large the result is
                self.clock.wait(gpu.index)
        if asserts:
            self.clock.stop(gpu.index)
        return out

    def _undefined(self, op: Operation, args, kwargs):
        with self.machine.aside():
            return errors.undefined(op.func, op.returns, args, kwargs)

    def _device(self, op: Operation, args, tensors) -> GPU | None:
        """The one GPU of these tensors, None for the CPU. As on a GPU, a CPU tensor of no dimension may join in."""
        gpu = UNKNOWN
        for tensor in tensors:
            try:
                home = tensor.untyped_storage()._virtual_home
            except NotImplementedError:  # sparse tensors
                home = None
            here = None if home is None else home.gpu
            if here is gpu or (here is None and (home is ANYWHERE or not (tensor.dim() or op.strict))):
                continue
            if gpu is UNKNOWN:
                gpu = here
            elif op.mixed:
                gpu = gpu or here
            else:
                raise mismatch(op, args)
        if gpu is UNKNOWN or gpu is None:
            return None
        if op.indexes and gpu_of(tensors[0]) is None:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return self.machine.own(gpu)

    def _flops(self, op: Operation, args, kwargs, tensors, out) -> int:
        key = (op.func, *[tensor.shape for tensor in tensors], *[arg for arg in args if type(arg) is bool])
        known = self.flops.get(key)
        if known is None:
            bound(self.flops)
            known = self.flops[key] = op.formula(*args, **kwargs, out_val=out)
        return known

    def _settle_all(self, op: Operation, args, out, gpu: GPU) -> None:
        for at, tensor in enumerate(out):
            if tensor is None or at == op.host_result:
                continue
            if op.foreach:  # each result where its own input is
                gpu = gpu_of(args[0][at])
            self._settle(op, tensor, gpu)

    def _settle(self, op: Operation, tensor: torch.Tensor, gpu: GPU | None) -> None:
        storage = tensor.untyped_storage()
        home = storage._virtual_home
        if home is None:
            if op.new and gpu is not None:
                storage._virtual_home = Home(gpu, storage.nbytes())
        elif op.resizes and home.nbytes != storage.nbytes():
            storage._virtual_home = Home(home.gpu, storage.nbytes())

    def _launch_foreach(self, op: Operation, args, tensors) -> None:
        """One kernel per GPU that has tensors in the list, each with its share of the bytes."""
        first = [(tensor.nbytes, gpu_of(tensor)) for tensor in args[0]]
        total, nbytes = sum(size for size, _ in first) or 1, moved(tensors)
        for gpu in dict.fromkeys(where for _, where in first if where is not None):
            share = sum(size for size, where in first if where is gpu)
            seconds = gpu.spec.seconds(0, nbytes * share // total, torch.float32)
            self.clock.launch(gpu.index, seconds, op.name)

    def _crossing(self, args) -> tuple[GPU | None, GPU | None] | None:
        target, source = gpu_of(args[0]), gpu_of(args[1])
        return None if target is source else (source, target)


def _is_anywhere(tensor: torch.Tensor) -> bool:
    storage = storage_of(tensor)
    return storage is not None and storage._virtual_home is ANYWHERE
