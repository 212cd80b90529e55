"""Functional collectives (`_c10d_functional`), which DTensor and clip_grad_norm_ use: new tensors, made on the GPU, and a wait later.

PyTorch's C++ would make the results on what it takes for their device, the CPU. Here they are made by ordinary operations, so that
each has its place, its bytes and its time: make(collective, tensor, args, size) gives the result and the Call that fills it.
"""

from collections.abc import Mapping

import torch

from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import calls
from virtualgpu.distributed.calls import Call, Collective


def copy(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> tuple[torch.Tensor, Call]:
    """Of a copy, in place."""
    return in_place(collective, tensor.clone(memory_format=torch.contiguous_format), args, size)


def in_place(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> tuple[torch.Tensor, Call]:
    """Of the tensor itself."""
    of_c10d = {"tensors": [tensor], "reduce_op": _reduce_op(args), "root_rank": args.get("src", 0)}
    return tensor, calls.in_place(collective, of_c10d, size)


def parts(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> tuple[torch.Tensor, Call]:
    """Into a tensor of all ranks' parts, or of one."""
    out = args.get("out")
    if out is None:
        rows = tensor.shape[0] // size if collective.scatters else tensor.shape[0] * size
        out = tensor.new_empty((rows, *tensor.shape[1:]))
    return out, calls.parts(collective, [([out], [tensor.contiguous()])], {"reduce_op": _reduce_op(args)}, size)


def rows(collective: Collective, tensor: torch.Tensor, args: Mapping, size: int) -> tuple[torch.Tensor, Call]:
    """Rows from each rank."""
    out = tensor.new_empty((sum(args["output_split_sizes"]), *tensor.shape[1:]))
    return out, calls.rows(collective, {**args, "output": out, "input": tensor.contiguous()}, size)


def _reduce_op(args: Mapping):
    """A name, or (from 2.15 on) an operation."""
    op = args.get("reduce_op")
    return getattr(_compat.ReduceOp, op.upper()) if isinstance(op, str) else op
