"""Kernels that PyTorch has for CUDA and not for the CPU, in plain operations: each counts as one kernel of the GPU. And those that it
lacks for shapes alone, without which a dry run could not carry the operation out.

SyncBatchNorm is made of five of them (aten/src/ATen/native/cuda/Normalization.cu); the products are those with `out_dtype`. They are
registered for the CPU, where the bytes of a virtual GPU really are, and for shapes alone. A tensor that is the CPU's own is refused,
as PyTorch refuses it.
"""

import functools

import torch

from virtualgpu import _compat
from virtualgpu.engine import rms_norm
from virtualgpu.engine.allocation import allocation_of, gpu_of
from virtualgpu.engine.halves import exact

aten = torch.ops.aten


def install() -> None:
    """Register them where PyTorch has none."""
    for name, kernel in KERNELS.items():
        _compat.add_kernel(name, "CPU", _of_gpus(name, kernel))
        _compat.add_kernel(name, "Meta", kernel)
    for name, kernel in rms_norm.KERNELS.items():  # the CPU's tensors, too, as PyTorch has it
        _compat.add_kernel(name, "CPU", kernel)
        _compat.add_kernel(name, "Meta", kernel)
    for name, kernel in FOR_SHAPES.items():
        _compat.add_kernel(name, "Meta", kernel)


def _of_gpus(name: str, kernel):
    @functools.wraps(kernel)
    def on_gpu(first, *args, **kwargs):
        if gpu_of(first) is None:
            raise NotImplementedError(
                f"Could not run 'aten::{name}' with arguments from the 'CPU' backend: PyTorch has a CUDA kernel of it alone. "
                "Move the tensors to a GPU first"
            )
        return kernel(first, *args, **kwargs)

    return on_gpu


def record_stream(tensor, stream) -> None:
    """The memory of this tensor is not free before that stream is done with it. FSDP calls it past all dispatch modes."""
    allocation = allocation_of(tensor)
    if allocation is not None and allocation.gpu is not None and allocation.block is not None:
        with allocation.gpu.lock:
            allocation.gpu.memory.record_stream(allocation.block, stream.stream_id)


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
    share = 1 / count.sum().to(dy.dtype)
    slope = _like(x, invstd.square() * exact(sum_dy_xmu) * share)
    scale = invstd if weight is None else invstd * exact(weight)
    out = (dy - _like(x, exact(sum_dy) * share) - (x - _like(x, mean)) * slope) * _like(x, scale)
    return out.to(input.dtype)


def _product(function):
    """A product of tensors in half precision whose result is asked for in single."""

    def product(first, second, out_dtype):
        return function(first.to(out_dtype), second.to(out_dtype))

    return product


def _sum_of_product(function):
    def product(added, first, second, out_dtype, beta=1, alpha=1):
        return function(added.to(out_dtype), first.to(out_dtype), second.to(out_dtype), beta=beta, alpha=alpha)

    return product


def _like_second(gradient, tensor, *rest, **options):
    """A gradient has the shape of what it is the gradient of."""
    return torch.empty_like(tensor)


def _close_as_second(gradient, tensor, *rest, **options):
    """The same, however that lies."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _geqrf(matrix):
    return torch.empty_like(matrix), matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:])))


def _like_first(tensor, *rest, **options):
    return torch.empty_like(tensor)


def _with_mask(tensor, *rest, **options):
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _in_place(*args, **options) -> None:
    """All that it returns is in what it was given."""


FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
FOR_SHAPES = {
    **dict.fromkeys((*FUSED, *(f"{name}.tensor_lr" for name in FUSED)), _in_place),
    "_transformer_encoder_layer_fwd": _like_first,  # PyTorch 2.11
    "mish_backward": _like_second,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "fractional_max_pool3d_backward": _like_second,
    "_ctc_loss_backward": _close_as_second,
    "geqrf": _geqrf,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
}
KERNELS = {
    "record_stream": record_stream,
    "batch_norm_stats": _stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_gather_stats": _gather_stats,
    "batch_norm_gather_stats_with_counts": _gather_stats_with_counts,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
    "mm.dtype": _product(torch.mm),
    "bmm.dtype": _product(torch.bmm),
    "addmm.dtype": _sum_of_product(torch.addmm),
    "baddbmm.dtype": _sum_of_product(torch.baddbmm),
}
