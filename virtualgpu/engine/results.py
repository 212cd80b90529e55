"""What an operation returns gets its place, and its bytes on that GPU."""

import torch

from virtualgpu.engine.home import Home, gpu_of, sparse_parts
from virtualgpu.engine.machine import GPU
from virtualgpu.engine.operations import Operation


def settle(op: Operation, tensor: torch.Tensor, gpu: GPU | None) -> None:
    """A new tensor lives on `gpu`; one that changed its size gets a block of that size. Raises torch.OutOfMemoryError."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        for part in sparse_parts(tensor):
            settle(op, part, gpu)
        return
    home = storage._virtual_home
    if home is None or home.gpu is None:
        if gpu is not None and (op.new or home is not None):
            storage._virtual_home = Home(gpu, storage.nbytes())
    elif op.resizes and home.nbytes != storage.nbytes():
        where = home.gpu
        home = storage._virtual_home = None  # its block is free before the next is asked for
        storage._virtual_home = Home(where, storage.nbytes())


def settle_all(op: Operation, args, out, gpu: GPU) -> None:
    """As `settle`, for an operation with several results."""
    inputs = next((value for value in args if isinstance(value, (list, tuple)) and value), None) if op.foreach else None
    for at, tensor in enumerate(out):
        if isinstance(tensor, (list, tuple)):
            settle_all(op, args, tensor, gpu)
        elif isinstance(tensor, torch.Tensor) and at != op.host_result:
            if inputs:  # each result where its own input is
                gpu = gpu_of(inputs[at])
            settle(op, tensor, gpu)
