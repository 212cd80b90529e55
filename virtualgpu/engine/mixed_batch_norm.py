"""Batch norm of half precision, whose figures a GPU keeps in single precision.

CUDA's kernels reckon in single precision, give mean and deviation in it, and round what they store: weights and running figures may be
half (a model after `half()`), or the running figures single precision beside half weights (FSDP's mixed precision). The CPU's kernel
refuses the second, and rounds mean and deviation for the first: there all figures go in as single precision, as it takes them.
"""

import torch

from virtualgpu.engine import values
from virtualgpu.engine.allocation import MadeByCpp, gpu_of, label

aten = torch.ops.aten
HALF = {torch.float16: "Half", torch.bfloat16: "BFloat16"}


def forward(dispatch, func, args, kwargs):
    """native_batch_norm."""
    input, weight, bias, mean, variance, *rest = args
    if not _concerns(input, weight, mean):
        return NotImplemented
    running = _widened(dispatch, mean), _widened(dispatch, variance)
    weights = _weight(dispatch, input, weight), _widened(dispatch, bias)
    out = dispatch._run(func, (input, *weights, *running, *rest), kwargs)
    with dispatch.machine.untracked():
        for figure, wide in zip((mean, variance), running, strict=True):
            if wide is not figure:
                figure.copy_(wide)
        values.invalidate([figure for figure in (mean, variance) if figure is not None], "native_batch_norm")
    return out


def backward(dispatch, func, args, kwargs):
    """native_batch_norm_backward. Raises CUDA's RuntimeError for pictures that are not in channels_last, where running figures are not half."""
    gradient, input, weight, mean, variance, *rest = args
    if not _concerns(input, weight, mean):
        return NotImplemented
    last = input.dim() == 2 or (input.dim() > 3 and input.is_contiguous(memory_format=_last(input)))
    mixed = weight is not None and mean is not None and weight.dtype is not mean.dtype
    if mixed and not last:
        raise RuntimeError(f"Expected running_mean to have type {HALF[weight.dtype]} but got Float")
    running = _widened(dispatch, mean), _widened(dispatch, variance)
    first, *others = dispatch._run(func, (gradient, input, _weight(dispatch, input, weight), *running, *rest), kwargs)
    with dispatch:
        return first, *(None if other is None else other.to(input.dtype) for other in others)


def _concerns(input, weight, mean) -> bool:
    """Half input and weights on a GPU, where there are weights; running figures half or single, or none."""
    if input.dtype not in HALF or gpu_of(input) is None:
        return False
    if weight is None:
        return mean is None or mean.dtype is input.dtype
    return weight.dtype is input.dtype and (mean is None or mean.dtype in (input.dtype, torch.float32))


def _weight(dispatch, input, weight) -> torch.Tensor:
    """Single precision; ones where there is none, by which the CPU's kernel knows that figures are to be single precision."""
    if weight is not None:
        wide = _widened(dispatch, weight)
        wide.stands_for_half = True  # for the choice of CUDA's kernel (timing/norms.py)
        return wide
    with dispatch.machine.untracked():
        ones = torch.ones(input.shape[1], device=dispatch.machine.base)
    label(ones, MadeByCpp())
    return ones


def _widened(dispatch, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """In single precision, within the kernel: no memory of the GPU's. What is so already, or missing, as it is."""
    if tensor is None or tensor.dtype is torch.float32:
        return tensor
    with dispatch.machine.untracked():
        out = tensor.float()
    label(out, MadeByCpp())
    return out


def _last(input) -> torch.memory_format:
    return torch.channels_last_3d if input.dim() == 5 else torch.channels_last


OPERATIONS = {aten.native_batch_norm.default: forward, aten.native_batch_norm_backward.default: backward}
