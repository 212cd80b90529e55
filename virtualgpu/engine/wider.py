"""Types that CUDA's kernels take and the CPU's do not: abs and trace of bool, nansum of complex numbers (measured on an H100, PyTorch 2.11)."""

import torch

aten = torch.ops.aten


def absolute(tensor):
    """Call it untracked, as the others."""
    return tensor.clone() if tensor.dtype is torch.bool else aten.abs.default(tensor)


def trace(tensor):
    """How many are true."""
    return aten.trace.default(tensor.long() if tensor.dtype is torch.bool else tensor)


def nansum(tensor, dim=None, keepdim=False, *, dtype=None):
    """A complex number of which one part is nan counts as nothing."""
    if not tensor.is_complex():
        return aten.nansum.default(tensor, dim, keepdim, dtype=dtype)
    return aten.sum.dim_IntList(tensor.masked_fill(tensor.isnan(), 0), dim, keepdim, dtype=dtype)


OPERATIONS = {aten.abs.default: absolute, aten.trace.default: trace, aten.nansum.default: nansum}
