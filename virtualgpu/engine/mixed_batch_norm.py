"""Batch norm whose weights are half and whose running figures are single precision, as FSDP's mixed precision has it.

CUDA's kernels take that, the CPU's refuse it: there the weights go in as single precision, in which both reckon anyway.
"""

import torch

from virtualgpu.engine.allocation import MadeByCpp, gpu_of, label

aten = torch.ops.aten
HALF = {torch.float16: "Half", torch.bfloat16: "BFloat16"}


def forward(dispatch, func, args, kwargs):
    """native_batch_norm."""
    input, weight, bias, mean, *rest = args
    if not _mixed(input, weight, mean):
        return NotImplemented
    widened = (_widened(dispatch, weight), None if bias is None else _widened(dispatch, bias))
    return dispatch._run(func, (input, *widened, mean, *rest), kwargs)


def backward(dispatch, func, args, kwargs):
    """native_batch_norm_backward. Raises CUDA's RuntimeError for pictures that are not in channels_last."""
    gradient, input, weight, mean, *rest = args
    if not _mixed(input, weight, mean):
        return NotImplemented
    last = input.dim() == 2 or (input.dim() > 3 and input.is_contiguous(memory_format=_last(input)))
    if not last:
        raise RuntimeError(f"Expected running_mean to have type {HALF[weight.dtype]} but got Float")
    first, *others = dispatch._run(func, (gradient, input, _widened(dispatch, weight), mean, *rest), kwargs)
    with dispatch:
        return first, *(None if other is None else other.to(weight.dtype) for other in others)


def _mixed(input, weight, mean) -> bool:
    if weight is None or mean is None or weight.dtype not in HALF or mean.dtype is not torch.float32:
        return False
    return input.dtype is weight.dtype and gpu_of(input) is not None


def _widened(dispatch, tensor: torch.Tensor) -> torch.Tensor:
    """In single precision, within the kernel: no memory of the GPU's."""
    with dispatch.machine.untracked():
        out = tensor.float()
    label(out, MadeByCpp())
    return out


def _last(input) -> torch.memory_format:
    return torch.channels_last_3d if input.dim() == 5 else torch.channels_last


OPERATIONS = {aten.native_batch_norm.default: forward, aten.native_batch_norm_backward.default: backward}
