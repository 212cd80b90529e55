"""What NCCL's process group refuses, with its words (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).

`check` calls those of the collective's row first; each is check(call, rank, size).
"""

import torch
from torch import distributed as dist

from virtualgpu._compat import suggest_memory_format
from virtualgpu.distributed.calls import Call
from virtualgpu.engine.unsupported import FLOAT8

REFUSED = ("BAND", "BOR", "BXOR")  # NCCL has none of them
# The dtypes that it has (`ncclDataType`); torch/csrc/cuda/nccl.cpp, by which the kinds of COPIED go, names the same
DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
INVALID_ARGUMENT = ("ProcessGroupNCCL.cpp:3780", "invalid argument", "Invalid value for an argument.")
COPIED = ("all_to_all", "gather", "scatter")
SUMMED = {torch.float8_e4m3fn, torch.float8_e5m2}  # of FLOAT8, from Hopper on; all are copied
UNSUMMED = FLOAT8 - SUMMED
OF_COMPLEX = ("SUM", "AVG", "PREMUL_SUM")  # the others would reduce both halves of a number on their own


def check(call: Call, rank: int, size: int) -> None:
    """Raises PyTorch's error for a collective that this rank of so many cannot begin."""
    for refuse in call.collective.checks:
        refuse(call, rank, size)
    for outputs, inputs in call.pairs:
        for side in (outputs,) if outputs is inputs else (outputs, inputs):
            for tensor in side:
                if tensor.layout is not torch.strided:
                    if call.kind == "all_reduce":
                        raise RuntimeError(
                            "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead."
                        )
                    raise ValueError("Tensors must be CUDA and dense")
                if tensor.is_contiguous():
                    continue
                if len(side) == 1:
                    _contiguous(tensor)
                if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                    raise ValueError("Tensors must be non-overlapping and dense")


def check_what_nccl_has(call: Call, size: int, capability: tuple[int, int]) -> None:
    """Raises PyTorch's error for a root and for dtypes that gloo would refuse in words of its own, or not at all.

    capability: the GPU's.
    """
    if call.kind in ("broadcast", "reduce") and not 0 <= call.root < size:
        words = f"{call.kind.capitalize()} : invalid root {call.root} (root should be in the 0..{size} range)"
        raise refused_by_nccl(*INVALID_ARGUMENT, words)
    if call.reduction[0] and capability < (9, 0) and any(tensor.dtype in SUMMED for tensor in call.tensors):
        # of its taskAppend, enqueue.cc; copies of FP8 are refused by NCCL 2.27 and before alone
        raise refused_by_nccl(*INVALID_ARGUMENT, "FP8 reduction support begins with sm90 capable devices.")
    for tensor in call.tensors:
        if tensor.dtype not in DTYPES and not tensor.is_complex():  # a complex number is sent as two
            name = str(tensor.dtype).removeprefix("torch.").replace("uint", "UInt")
            name = "Short" if name == "int16" else name[0].upper() + name[1:]
            if call.kind in COPIED:
                raise RuntimeError(f"Unconvertible NCCL type {name}")
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {name}")


def refused_by_nccl(source: str, kind: str, meaning: str, words: str) -> dist.DistBackendError:
    """PyTorch's error where NCCL itself refuses (as 2.11 says it on an H100, 2026-11-26). source: PyTorch's file that called it."""
    name = "".join(part.capitalize() for part in kind.split())
    version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/{source}, {kind} (run with NCCL_DEBUG=WARN for details), "
        f"NCCL version {version}\nnccl{name}: {meaning}\nLast error:\n{words}"
    )


def _contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
        raise ValueError("Tensors must be contiguous")


# -- of rows


def contiguous(call: Call, rank: int, size: int) -> None:
    """Also in lists."""
    for tensor in call.tensors:
        if tensor.layout is torch.strided:
            _contiguous(tensor)


def reduction(call: Call, rank: int, size: int) -> None:
    """Operations that NCCL has for these dtypes."""
    name, _ = call.reduction
    if name in REFUSED:
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if any(tensor.dtype in UNSUMMED for tensor in call.tensors):
        raise RuntimeError("Unsupported Float8 type for NCCL reduction")
    if name == "AVG" and any(tensor.dtype is torch.bool for tensor in call.tensors):
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if name not in OF_COMPLEX and any(tensor.is_complex() for tensor in call.tensors):
        raise RuntimeError(f"{call.kind} does not support {name} on complex tensors")


def parts(call: Call, rank: int, size: int) -> None:
    """An all_gather's outputs and a reduce_scatter's inputs: a list of as many tensors as ranks, or one tensor of their size."""
    scatters = call.collective.scatters
    way = "input" if scatters else "output"
    for outputs, inputs in call.pairs:
        (own,), many = (outputs, inputs) if scatters else (inputs, outputs)
        if len(many) not in (1, size):
            raise ValueError(f"{call.kind}: invalid {way} tensor list (expected length {size}, got {len(many)})")
        if len(many) == 1 and own.dtype != many[0].dtype:
            raise TypeError(
                "input tensor must be the same type as the output tensor."
                if scatters
                else "output tensor must have the same type as input tensor"
            )
        if len(many) == 1 and own.numel() * size != many[0].numel():
            raise ValueError(
                "input tensor must be the same size as output size times world size"
                if scatters
                else "output tensor size must be equal to world_size times input tensor size"
            )


def _sizes(tensor: torch.Tensor) -> str:
    """As c10d's toString has it (Utils.hpp): one size without a comma."""
    return f"({', '.join(map(str, tensor.shape))})"


def rooted(call: Call, rank: int, size: int) -> None:
    """The root of a gather or scatter gives a list with a tensor for each rank, the others give none."""
    name, scatters = f"ProcessGroupNCCL::{call.kind}", call.collective.scatters
    if not 0 <= call.root < size:
        raise ValueError(f"{name}: invalid root rank: {call.root}")
    way = "input" if scatters else "output"
    for outputs, inputs in call.pairs:
        many, (one, *_) = (inputs, outputs) if scatters else (outputs, inputs)
        if rank != call.root:
            if many:
                raise ValueError(f"{name}: requires empty {way} on non-root")
            continue
        if len(many) == 1 and size > 1 and many[0].numel() == one.numel() * size:
            continue  # into a single tensor
        if len(many) != size:
            raise ValueError(
                f"{name}: Incorrect {way} list size {len(many)}. "
                f"{way.capitalize()} list size should be {size}, same as size of the process group."
            )
        for index, tensor in enumerate(many):
            if tensor.dtype != one.dtype:
                raise ValueError(
                    f"{name}: invalid tensor type at index {index} (expected {one.dtype}, got {tensor.dtype})"
                )
            if tensor.shape != one.shape:
                raise ValueError(
                    f"{name}: invalid tensor size at index {index} (expected {_sizes(one)}, got {_sizes(tensor)})"
                )
