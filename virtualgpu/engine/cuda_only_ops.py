"""Kernels that PyTorch has for CUDA and lacks elsewhere: SyncBatchNorm's, RMS norm, products with `out_dtype`; and half batch norm.

Each counts as one kernel of the GPU. They are put together of plain operations, for the CPU, where the bytes of a virtual GPU really are,
and for shapes alone, and are registered where PyTorch has none; a tensor that is the CPU's own is refused, as PyTorch refuses it.
"""

import functools

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine import meta_kernels, values
from virtualgpu.engine.cuda_differences import exact
from virtualgpu.engine.frames import MadeByCpp
from virtualgpu.engine.storage import PLAIN_TYPES, allocation_of, gpu_of, is_plain, label

# -- Batch norm of half precision, whose figures a GPU keeps in single precision.
#
# CUDA's kernels reckon in single precision, give mean and deviation in it, and round what they store: weights and running figures may be
# half (a model after `half()`), or the running figures single precision beside half weights (FSDP's mixed precision). The CPU's kernel
# refuses the second, and rounds mean and deviation for the first: there all figures go in as single precision, as it takes them.

aten = torch.ops.aten
HALF = {torch.float16: "Half", torch.bfloat16: "BFloat16"}


def batch_norm(dispatch, func, args, kwargs):
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


def batch_norm_backward(dispatch, func, args, kwargs):
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
    if (wide := _widened(dispatch, weight)) is not None:
        wide.stands_for_half = True  # for the choice of CUDA's kernel (timing/reductions.py)
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


BATCH_NORM = {aten.native_batch_norm.default: batch_norm, aten.native_batch_norm_backward.default: batch_norm_backward}


# -- SyncBatchNorm's operations, which PyTorch has for CUDA alone, in plain ones (aten/src/ATen/native/cuda/Normalization.cu).


def _sum(tensor):
    """Over all dimensions but that of the channels."""
    dims = [dim for dim in range(tensor.dim()) if dim != 1]
    return tensor.sum(dims) if dims else tensor.clone()


def _like(tensor, channels):
    """One number a channel, beside `tensor`."""
    return channels.view([-1 if dim == 1 else 1 for dim in range(tensor.dim())])


def _stats(input, eps):
    """(mean, 1 / standard deviation) of each channel."""
    x = exact(input)
    count = x.numel() // max(x.shape[1], 1)
    mean = _sum(x) / count
    variance = _sum((x - _like(x, mean)).square()) / count
    return mean, (variance + eps).rsqrt()


def _elemt(input, weight, bias, mean, invstd, eps):
    x = exact(input)
    out = (x - _like(x, mean)) * _like(x, invstd)
    if weight is not None:
        out = out * _like(x, exact(weight))
    if bias is not None:
        out = out + _like(x, exact(bias))
    return out.to(input.dtype)


def _gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, count):
    kind = input if running_mean is None else running_mean
    counts = mean.new_full((mean.shape[0],), count, dtype=kind.dtype)
    return _gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


def _gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """Mean and 1 / standard deviation of all, from those of the parts, a row each. Writes to the running figures."""
    mean, invstd = exact(mean), exact(invstd)
    counts = counts.to(mean.dtype).view(-1, 1)
    total = counts.sum()
    overall = (mean * counts).sum(0) / total
    squares = ((invstd.square().reciprocal() - eps + (mean - overall).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.copy_((1 - momentum) * running_mean + momentum * overall)
    if running_var is not None:
        running_var.copy_((1 - momentum) * running_var + momentum * (squares / (total - 1)))
    return overall, (squares / total + eps).rsqrt()


def _backward_reduce(gradient, input, mean, invstd, weight, input_g, weight_g, bias_g):
    """(sum of the gradient, of gradient times (input - mean), gradient of the weight, of the bias), as far as they are wanted."""
    dy, x = exact(gradient), exact(input)
    summed = _sum(dy)
    correlated = _sum(dy * (x - _like(x, mean)))
    kind = gradient.dtype if weight is None else weight.dtype
    return (
        summed.to(mean.dtype, copy=True) if input_g else None,
        correlated.to(mean.dtype) if input_g else None,
        (correlated * invstd).to(kind) if weight_g else None,
        summed.to(kind, copy=True) if bias_g else None,
    )


def _backward_elemt(gradient, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    dy, x = exact(gradient), exact(input)
    fraction = 1 / count.sum().to(dy.dtype)
    slope = _like(x, invstd.square() * exact(sum_dy_xmu) * fraction)
    scale = invstd if weight is None else invstd * exact(weight)
    out = (dy - _like(x, exact(sum_dy) * fraction) - (x - _like(x, mean)) * slope) * _like(x, scale)
    return out.to(input.dtype)


SYNC_BATCH_NORM = {
    "batch_norm_stats": _stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_gather_stats": _gather_stats,
    "batch_norm_gather_stats_with_counts": _gather_stats_with_counts,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}


# -- RMS norm as a GPU has it: one kernel, which keeps 1 / root mean square of each row, and another one backward.
#
# PyTorch's CPU carries it out in plain operations, which keep three tensors of the input's size (rms_norm_symint in
# aten/src/ATen/native/layer_norm.cpp). CUDA's kernels reckon in single precision (cuda/layer_norm_kernel.cu). Their bytes are those of an
# H100, PyTorch 2.11, measured 2026-11-26.


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


def rms_norm(input, normalized_shape, weight, eps):
    """_fused_rms_norm: (output, 1 / root mean square of each row)."""
    x, dims = exact(input), _dims(normalized_shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    out = x * rstd
    return (out if weight is None else out * exact(weight)).to(input.dtype), rstd


def rms_norm_backward(gradient, input, normalized_shape, rstd, weight, mask):
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


RMS_NORM = {"_fused_rms_norm": rms_norm, "_fused_rms_norm_backward": rms_norm_backward}


# -- Where they are registered, with products and record_stream.


def install() -> None:
    """Register them where PyTorch has none."""
    for name, kernel in KERNELS.items():
        _compat.add_kernel(name, "CPU", _of_gpus(name, kernel))
        _compat.add_kernel(name, "Meta", kernel)
    for name, kernel in RMS_NORM.items():  # the CPU's tensors, too, as PyTorch has it
        _compat.add_kernel(name, "CPU", kernel)
        _compat.add_kernel(name, "Meta", kernel)
    for name, kernel in meta_kernels.KERNELS.items():
        _compat.add_kernel(name, "Meta", kernel)


def _of_gpus(name: str, kernel):
    @functools.wraps(kernel)
    def on_gpu(first, *args, **kwargs):
        if gpu_of(first) is None:
            raise errors.without_cpu_kernel(name)
        return kernel(first, *args, **kwargs)

    return on_gpu


def record_stream(tensor, stream) -> None:
    """The memory of this tensor is not free before that stream is done with it. FSDP calls it past all dispatch modes."""
    allocation = allocation_of(tensor)
    if allocation is not None and allocation.gpu is not None and allocation.block is not None:
        with allocation.gpu.lock:
            allocation.gpu.memory.record_stream(allocation.block, stream.stream_id)


def _product(function):
    """A product of tensors in half precision whose result is asked for in single."""

    def product(first, second, out_dtype):
        return function(first.to(out_dtype), second.to(out_dtype))

    return product


def _sum_of_product(function):
    def product(added, first, second, out_dtype, beta=1, alpha=1):
        return function(added.to(out_dtype), first.to(out_dtype), second.to(out_dtype), beta=beta, alpha=alpha)

    return product


KERNELS = {
    "record_stream": record_stream,
    **SYNC_BATCH_NORM,
    "mm.dtype": _product(torch.mm),
    "bmm.dtype": _product(torch.bmm),
    "addmm.dtype": _sum_of_product(torch.addmm),
    "baddbmm.dtype": _sum_of_product(torch.baddbmm),
}
