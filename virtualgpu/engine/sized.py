"""Results whose shape depends on values, as a dry run has them: x[mask], nonzero, unique, where the numbers are known (values.py)."""

import torch
from torch import Tensor

from virtualgpu import _compat
from virtualgpu.engine.host_waits import MASKS
from virtualgpu.engine.values import attach, computed, known_of


def result_of(op, args, kwargs, tensors):
    """A result whose shape depends on values; NotImplemented where those are not known. Call it untracked."""
    result = computed(op, args, kwargs, tensors, known_of)
    if result is NotImplemented:
        return result if op.writes else _masked(op, args)
    if op.writes:  # out=...: computed into its shadow
        (out,) = op.written(args, kwargs)
        return out.resize_(result.shape).as_strided_(result.shape, result.stride())
    return shaped(result)


def _masked(op, args):
    """Of x[mask], the mask alone has to be known."""
    if op.name == "masked_select" and (mask := known_of(args[1])) is not None:
        count = mask.expand(torch.broadcast_shapes(args[0].shape, mask.shape)).sum()
        return _compat.empty_strided((int(count),), (1,), dtype=args[0].dtype, device="meta")
    return _picked(*args) if op.indexes else NotImplemented


def _picked(x: Tensor, indices: list):
    """The shape of x[indices], masks among them."""
    places = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            places.append(index)
        elif (known := known_of(index)) is None or not known.dim():
            return NotImplemented
        else:
            places += known.nonzero().unbind(1)
    if not _compat.is_really_meta(x):
        x = _compat.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.ops.aten.index(x, places)


def shaped(result):
    """A result with values as a dry run has it: a shape with a shadow."""
    if not isinstance(result, Tensor):
        return type(result)(map(shaped, result))
    out = _compat.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    attach([out], [result])
    return out
