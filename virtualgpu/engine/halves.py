"""Products, convolutions and attention of float16: carried out in float32, and the result rounded.

The CPU's own kernels for float16 take up to a hundred times as long as those for float32 where the processor has no instructions for it,
and some of them add up in float16. A GPU's add up in float32, as is done here, on every machine alike. The float32 copies are the
host's: nothing of them lies on the GPU, and its time is that of float16. What costs no more in float16 keeps the CPU's kernel.
"""

import torch
from torch import Tensor

aten, HALF, STRIDED = torch.ops.aten, torch.float16, torch.strided

OPERATIONS = {
    aten.mm.default,
    aten.mm.out,
    aten.addmm.default,
    aten.addmm.out,
    aten.addmm_.default,
    aten._addmm_activation.default,
    aten.bmm.default,
    aten.bmm.out,
    aten.baddbmm.default,
    aten.baddbmm.out,
    aten.baddbmm_.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}


def run(op, args, kwargs, tensors):
    """One of OPERATIONS whose first tensor is of float16. Where others are not, it is PyTorch's to say what it thinks of that."""
    if any(tensor.dtype is not HALF or tensor.layout is not STRIDED for tensor in tensors):
        return op.func(*args, **kwargs)
    kind = accumulated_in()
    wide_args = [_to(value, kind) for value in args]
    wide_kwargs = {name: _to(value, kind) for name, value in kwargs.items()}
    out = op.func(*wide_args, **wide_kwargs)
    if not op.writes:
        return tuple(map(rounded, out)) if isinstance(out, tuple) else rounded(out)
    index, name = op.writes[0]
    target = kwargs[name] if name in kwargs else args[index]
    if target.shape != out.shape:
        aten.resize_.default(target, out.shape)
    return aten.copy_.default(target, out)


def accumulated_in() -> torch.dtype:
    """float32; float64 where the program lets the CPU multiply float32 with the precision of bfloat16, which is below float16's."""
    return torch.float64 if torch.get_float32_matmul_precision() == "medium" else torch.float32


def widened(tensor: Tensor | None) -> Tensor | None:
    """In float32, if it is of float16. Call it untracked."""
    return _to(tensor, accumulated_in())


def rounded(tensor: Tensor | None) -> Tensor | None:
    """Back in float16."""
    return tensor if tensor is None else aten._to_copy.default(tensor, dtype=HALF)


def _to(value, kind: torch.dtype):
    if not isinstance(value, Tensor) or value.dtype is not HALF:
        return value
    return aten._to_copy.default(value, dtype=kind)
