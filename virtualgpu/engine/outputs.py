"""What an operation returns gets its place, and its bytes on that GPU."""

import torch

from virtualgpu.engine.allocation import Allocation, gpu_of, sparse_parts
from virtualgpu.engine.machine import GPU
from virtualgpu.engine.operations import Operation


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
    """As `settle`, for an operation with several results."""
    inputs = next((value for value in args if isinstance(value, (list, tuple)) and value), None) if op.foreach else None
    for at, tensor in enumerate(out):
        if isinstance(tensor, (list, tuple)):
            place_outputs(op, args, tensor, gpu)
        elif isinstance(tensor, torch.Tensor) and at != op.host_result:
            if inputs:  # each result where its own input is
                gpu = gpu_of(inputs[at])
            place_output(op, tensor, gpu)
