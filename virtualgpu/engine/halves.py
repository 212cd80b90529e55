"""Products, convolutions and attention of float16, grids sampled in half precision, and what the CPU has no half kernel of: carried out in float32, and the result rounded.

The CPU's own kernels for float16 take up to a hundred times as long as those for float32 where the processor has no instructions for it,
and some of them add up in float16. A GPU's add up in float32, as is done here, on every machine alike. The float32 copies are the
host's: nothing of them lies on the GPU, and its time is that of float16. What costs no more in float16 keeps the CPU's kernel.

grid_sample: the CPU's kernel works out where to look in float16 or bfloat16 itself, and is off by a fifth of a pixel's value where a GPU's
(opmath_t in aten/src/ATen/native/cuda/GridSampler.cu) is right but for the last bit.
"""

import torch
from torch import Tensor

from virtualgpu import _compat

aten, STRIDED = torch.ops.aten, torch.strided
HALF, HALVES = torch.float16, (torch.float16, torch.bfloat16)

PRODUCTS = {
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
GRIDS = {aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default}
GRIDS |= {aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default}
ABSENT = {  # the CPU has no kernel of them in half precision
    getattr(aten, f"{name}{backward}").default
    for name in ("avg_pool3d", "multi_margin_loss", "multilabel_margin_loss")
    for backward in ("", "_backward")
}
ABSENT |= {aten.multilabel_margin_loss_forward.default}
ABSENT |= {aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default}
ABSENT |= {aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default}
# of which types each is carried out so
OPERATIONS = {**dict.fromkeys(PRODUCTS, (HALF,)), **dict.fromkeys(GRIDS | ABSENT, HALVES)}


def run(op, args, kwargs, tensors):
    """One of OPERATIONS, its first tensor of one of its types. Where others are not, it is PyTorch's to say what it thinks of that."""
    narrow = tensors[0].dtype
    if any(_is_other(tensor, narrow) or tensor.layout is not STRIDED for tensor in tensors):
        return op.func(*args, **kwargs)
    wide = accumulated_in()
    wide_args = [_to(value, narrow, wide) for value in args]
    wide_kwargs = {name: _to(value, narrow, wide) for name, value in kwargs.items()}
    out = op.func(*wide_args, **wide_kwargs)
    if not op.writes:
        return tuple(_to(entry, wide, narrow) for entry in out) if isinstance(out, tuple) else _to(out, wide, narrow)
    index, name = op.writes[0]
    target = kwargs[name] if name in kwargs else args[index]
    if target.shape != out.shape:
        aten.resize_.default(target, out.shape)
    return aten.copy_.default(target, out)


def _is_other(tensor: Tensor, narrow: torch.dtype) -> bool:
    """Of another type that may be multiplied? Whole numbers say which class it is."""
    return tensor.dtype is not narrow and (tensor.is_floating_point() or tensor.is_complex())


def accumulated_in() -> torch.dtype:
    """float32; float64 where the program lets the CPU multiply float32 with the precision of bfloat16, which is below float16's."""
    return torch.float64 if _compat.cpu_multiplies_in_bfloat16() else torch.float32


def exact(tensor: Tensor) -> Tensor:
    """What CUDA's norms reckon in: single precision for half."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def widened(tensor: Tensor | None) -> Tensor | None:
    """In float32, if it is of float16. Call it untracked."""
    return _to(tensor, HALF, accumulated_in())


def _to(value, source: torch.dtype, target: torch.dtype):
    """A tensor of the type `source` in the type `target`; anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype is not source:
        return value
    return aten._to_copy.default(value, dtype=target)
