"""What NCCL's process group refuses, with its words (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp)."""

import torch

from virtualgpu._compat import suggest_memory_format
from virtualgpu.distributed.calls import Call

REFUSED = ("BAND", "BOR", "BXOR")  # NCCL has none of them
OF_COMPLEX = ("SUM", "AVG", "PREMUL_SUM")  # the others would reduce both halves of a number on their own


def check(call: Call, rank: int, size: int) -> None:
    """Raises PyTorch's error for a collective that this rank of so many cannot begin."""
    for tensor in call.tensors:
        if tensor.layout is not torch.strided:
            if call.kind == "all_reduce":
                raise RuntimeError(
                    "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead."
                )
            raise ValueError("Tensors must be CUDA and dense")
    if call.op is not None:
        _reduction(call)
    if call.kind in ("gather", "scatter"):
        _rooted(call, rank, size)
    if call.kind in ("all_gather", "reduce_scatter"):
        for pair in call.pairs:
            many = pair[call.kind == "reduce_scatter"]
            if len(many) not in (1, size):
                way = "output" if call.kind == "all_gather" else "input"
                raise ValueError(f"{call.kind}: invalid {way} tensor list (expected length {size}, got {len(many)})")
    one = [pair for pair in call.pairs if len(pair[0]) == len(pair[1]) == 1]
    if call.kind == "all_gather":
        for (output,), (given,) in one:
            if output.dtype != given.dtype:
                raise TypeError("output tensor must have the same type as input tensor")
            if output.numel() != given.numel() * size:
                raise ValueError("output tensor size must be equal to world_size times input tensor size")
    if call.kind == "reduce_scatter":
        for (output,), (given,) in one:
            if output.dtype != given.dtype:
                raise TypeError("input tensor must be the same type as the output tensor.")
            if given.numel() != output.numel() * size:
                raise ValueError("input tensor must be the same size as output size times world size")
    for outputs, inputs in call.pairs:
        for side in (outputs, inputs):
            for tensor in side if len(side) == 1 or call.kind == "all_to_all" else ():
                if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
                    raise ValueError("Tensors must be contiguous")
            if not all(map(_dense, side)):
                raise ValueError("Tensors must be non-overlapping and dense")


def _reduction(call: Call) -> None:
    name, _ = call.reduction
    if name in REFUSED:
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if name == "AVG" and any(tensor.dtype is torch.bool for tensor in call.tensors):
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if name not in OF_COMPLEX and any(tensor.is_complex() for tensor in call.tensors):
        raise RuntimeError(f"{call.kind} does not support {name} on complex tensors")


def _rooted(call: Call, rank: int, size: int) -> None:
    """The root of a gather or scatter gives a list with a tensor for each rank, the others give none."""
    name = f"ProcessGroupNCCL::{call.kind}"
    if not 0 <= call.root < size:
        raise ValueError(f"{name}: invalid root rank: {call.root}")
    way = "output" if call.kind == "gather" else "input"
    for outputs, inputs in call.pairs:
        many, one = (outputs, inputs) if call.kind == "gather" else (inputs, outputs)
        if rank != call.root:
            if many:
                raise ValueError(f"{name}: requires empty {way} on non-root")
            continue
        if len(many) == 1 and size > 1 and many[0].numel() == one[0].numel() * size:
            continue  # into a single tensor
        if len(many) != size:
            raise ValueError(
                f"{name}: Incorrect {way} list size {len(many)}. "
                f"{way.capitalize()} list size should be {size}, same as size of the process group."
            )
        for at, tensor in enumerate(many):
            if tensor.dtype != one[0].dtype:
                raise ValueError(
                    f"{name}: invalid tensor type at index {at} (expected {one[0].dtype}, got {tensor.dtype})"
                )
            if tensor.shape != one[0].shape:
                raise ValueError(
                    f"{name}: invalid tensor size at index {at} (expected {tuple(one[0].shape)}, got {tuple(tensor.shape)})"
                )


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
