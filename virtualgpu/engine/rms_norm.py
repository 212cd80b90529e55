"""RMS norm as a GPU has it: one kernel, which keeps 1 / root mean square of each row, and another one backward.

PyTorch's CPU carries it out in plain operations, which keep three tensors of the input's size (rms_norm_symint in
aten/src/ATen/native/layer_norm.cpp). CUDA's kernels reckon in single precision (cuda/layer_norm_kernel.cu). Their bytes are those of an
H100, PyTorch 2.11, measured 2026-11-26.
"""

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import PLAIN_TYPES, gpu_of, is_plain
from virtualgpu.engine.halves import exact


def is_fused(input, weight) -> bool:
    """Does a GPU take these kernels? Not for channels last, complex numbers, and weights of another type."""
    return (
        is_plain(input)
        and not input.is_nested
        and gpu_of(input) is not None
        and not input.is_complex()
        and (weight is None or (type(weight) in PLAIN_TYPES and weight.dtype is input.dtype))
        and _compat.suggest_memory_format(input) is torch.contiguous_format
    )


def forward(input, normalized_shape, weight, eps):
    """_fused_rms_norm: (output, 1 / root mean square of each row)."""
    x, dims = exact(input), _dims(normalized_shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    out = x * rstd
    return (out if weight is None else out * exact(weight)).to(input.dtype), rstd


def backward(gradient, input, normalized_shape, rstd, weight, mask):
    """_fused_rms_norm_backward: gradients of input and weight, None for those that nobody asked for."""
    dy, x, dims = exact(gradient), exact(input), _dims(normalized_shape)
    normed = x * rstd
    dx = dweight = None
    if mask[0]:
        scaled = dy if weight is None else dy * exact(weight)
        dx = ((scaled - normed * (scaled * normed).mean(dims, keepdim=True)) * rstd).to(input.dtype)
    if mask[1] and weight is not None:
        rows = list(range(input.dim() - len(dims)))
        dweight = dy * normed
        dweight = (dweight.sum(rows) if rows else dweight).to(weight.dtype)
    return dx, dweight


def _dims(normalized_shape) -> list[int]:
    return list(range(-len(normalized_shape), 0))


KERNELS = {"_fused_rms_norm": forward, "_fused_rms_norm_backward": backward}
