"""On which GPU an operation runs, by where its tensors are and whether they may meet; and what it returns gets its bytes there."""

import torch

from virtualgpu.engine import overrides
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.operations import Operation, mismatch
from virtualgpu.engine.storage import Allocation, allocation_of, gpu_of, holders, label, sparse_parts

UNSET = object()


class Placement:
    """Finds the place of an operation on one machine."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.last: GPU | None = None  # on which the latest operation ran

    def find(self, op: Operation, args, kwargs, tensors) -> GPU | None:
        """The one GPU of these tensors, None for the CPU. As on a GPU, a CPU tensor of no dimension may join in."""
        if op.foreach:
            return self._of_lists(op, args, kwargs, tensors)
        gpu, unplaced, inferred, written = UNSET, None, None, False
        for tensor in tensors:
            try:
                allocation = tensor.untyped_storage()._virtual_allocation
            except NotImplementedError:  # sparse tensors
                allocation = allocation_of(tensor)
            here = None if allocation is None else allocation.gpu
            if here is None:
                if allocation is not None:
                    if allocation.in_creating_call and (
                        allocation.in_backward or not holders.in_python(tensor, tensors)
                    ):
                        unplaced = [tensor] if unplaced is None else [*unplaced, tensor]
                        continue
                    label(tensor, None)
                if gpu is None:
                    continue
                if not (op.strict or tensor.dim()):
                    written = written or overrides.is_written(op, tensor, args, kwargs)
                    continue
            elif here is gpu:
                continue
            elif allocation.inferred and (gpu is not UNSET or len(tensors) > 1):
                unplaced = [tensor] if unplaced is None else [*unplaced, tensor]
                inferred = here
                continue
            if gpu is UNSET:
                gpu = here
            elif op.mixed:
                gpu = gpu or here
            elif not overrides.may_stay_on_cpu(op, tensor, gpu, here):
                raise mismatch(op, args, kwargs)
        if gpu is UNSET and inferred is not None:
            gpu = inferred
        if gpu is UNSET or gpu is None:
            for tensor in unplaced or ():
                # an inference that was wrong: it is the CPU's
                if gpu is None and allocation_of(tensor).gpu is not None:
                    label(tensor, None)
            return None
        if op.mixed:
            gpu = overrides.place_of_mixed(op, args, kwargs, gpu)
        elif written:
            raise mismatch(op, args, kwargs)
        if unplaced:
            for tensor in unplaced:
                if allocation_of(tensor).gpu is not gpu:
                    self.machine.place(tensor, gpu)
        self.last = gpu
        machine = self.machine
        return machine.own(gpu) if machine.forked or gpu.machine is not machine else gpu

    def _of_lists(self, op: Operation, args, kwargs, tensors) -> GPU | None:
        """Entries of one list may be anywhere; those at one place in all lists must be together."""
        # of addcdiv and addcmul
        if len(args) > 3 and isinstance(args[3], torch.Tensor) and gpu_of(args[3]) is not None:
            raise RuntimeError(f"Expected scalars to be on CPU, got {args[3].device} instead.")
        common = gpu_of(tensors[0]) if tensors else None
        if common is not None and all([gpu_of(tensor) is common for tensor in tensors]):
            return self.machine.own(common)
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
        takes_scalar = op.name.startswith("_foreach") and len(args) > 1 and isinstance(args[1], torch.Tensor)
        if takes_scalar and (where := gpu_of(args[1])) is not None:
            self._check_scalar(op, args[0], args[1], where)
        first = None
        for column in zip(*[entries for entries in lists if isinstance(entries[0], torch.Tensor)], strict=False):
            devices = {gpu_of(tensor) for tensor in column if tensor.dim() or gpu_of(tensor) is not None}
            if len(devices) > 1:
                raise mismatch(op, column, {})
            first = first or next(iter(devices), None)
        common = first or next((gpu for tensor in tensors if (gpu := gpu_of(tensor)) is not None), None)
        return common and self.machine.own(common)

    def _check_scalar(self, op: Operation, entries, scalar: torch.Tensor, where: GPU) -> None:
        """A GPU's tensor of no dimension goes with that GPU's entries alone. Entries at one place meet it in one kernel
        (ForeachBinaryOpScalarTensor.cu), others one by one."""
        devices = [gpu_of(entry) for entry in entries]
        alike = len(set(devices)) == 1 and entries[0].dtype == scalar.dtype and devices[0] is not None
        for entry, place in zip(entries, devices, strict=True):
            if place is not where and (place is not None or entry.dim()):
                if alike:
                    raise RuntimeError(f"scalar tensor expected to be on {entry.device} but is on {scalar.device}")
                raise mismatch(op, ([entry], scalar), {})


def place_output(op: Operation, tensor: torch.Tensor, gpu: GPU | None) -> None:
    """A new tensor lives on `gpu`; one that changed its size gets a block of that size. Raises torch.OutOfMemoryError."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        for part in sparse_parts(tensor):
            place_output(op, part, gpu)
        return
    allocation = storage._virtual_allocation
    if allocation is None or allocation.gpu is None:
        if gpu is not None and (op.new or allocation is not None):
            storage._virtual_allocation = Allocation(gpu, storage.nbytes())
    elif op.resizes and allocation.nbytes != storage.nbytes():
        where = allocation.gpu
        allocation = storage._virtual_allocation = None  # its block is free before the next is asked for
        storage._virtual_allocation = Allocation(where, storage.nbytes())


def place_outputs(op: Operation, args, out, gpu: GPU) -> None:
    """As `place_output`, for an operation with several results."""
    inputs = next((value for value in args if isinstance(value, (list, tuple)) and value), None) if op.foreach else None
    for index, tensor in enumerate(out):
        if isinstance(tensor, (list, tuple)):
            place_outputs(op, args, tensor, gpu)
        elif isinstance(tensor, torch.Tensor) and index != op.host_result:
            if index == op.empty_result:
                label(tensor, Allocation(gpu, 0))
                continue
            if inputs:  # each result where its own input is
                gpu = gpu_of(inputs[index])
            place_output(op, tensor, gpu)
