"""Where PyTorch's kernels for shapes alone (meta kernels) are missing, or say something else than its others: a layout, a type, a size, a storage."""

from collections.abc import Callable

import torch

from virtualgpu import _compat
from virtualgpu.engine import cuda_differences

aten = torch.ops.aten
NONE, MEAN = 0, 1  # at::Reduction


def by_meta_kernel(func, args, options):
    """What the operation returns for these shapes, as its other kernels have it. Call it untracked. Raises NotImplementedError without a kernel."""
    out = INSTEAD.get(func, func)(*args, **options)
    correct = CORRECTIONS.get(func)
    return out if correct is None else correct(args, options, out)


# -- Missing ones, which `cuda_only_ops.install` registers: what they return has no values


def _like(position: int, **options) -> Callable:
    """A result has the shape of this argument: a gradient that of what it is the gradient of."""
    return lambda *args, **rest: torch.empty_like(args[position], **options)


def _with_mask(tensor, *rest):
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _geqrf(matrix):
    return torch.empty_like(matrix), matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:])))


FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
KERNELS: dict[str, Callable] = {
    # all that they return is in what they were given
    **dict.fromkeys((*FUSED, *(f"{name}.tensor_lr" for name in FUSED)), lambda *args, **options: None),
    "_transformer_encoder_layer_fwd": _like(0),  # PyTorch 2.11
    "mish_backward": _like(1),
    "multi_margin_loss_backward": _like(1),
    "multilabel_margin_loss_backward": _like(1),
    "fractional_max_pool3d_backward": _like(1),
    "_ctc_loss_backward": _like(1, memory_format=torch.contiguous_format),
    "geqrf": _geqrf,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
}


# -- What is asked for a shape in place of the operation


def _nll_loss(tensor, target, *rest):
    """Its kernel for shapes wants int64, or calls it gather's."""
    return aten.nll_loss_forward.default(tensor, target.long(), *rest)


def _masked_fill(tensor, mask, value):
    """The value may be one number of the host's."""
    return aten.masked_fill.Tensor(tensor, mask, torch.empty_like(value, device="meta"))


def _where(condition, *tensors):
    """A mask may be of uint8."""
    return aten.where.self(condition.bool(), *tensors)


# draws and their derivatives, one for each number of the first argument
DRAWS = [aten._sample_dirichlet, aten._dirichlet_grad, aten._standard_gamma, aten._standard_gamma_grad]
DRAWS += [aten.poisson, aten.binomial]
INSTEAD = {
    **cuda_differences.FFT,
    **cuda_differences.WIDER,
    aten.nll_loss_forward.default: _nll_loss,
    aten.masked_fill.Tensor: _masked_fill,
    aten.where.self: _where,
    **{packet.default: _like(0) for packet in DRAWS},
}


# -- Corrections: (args, options, the result of the meta kernel) -> the result as the other kernels give it


def _convolved(first: int) -> Callable:
    """Channels come last in what a convolution returns where they do in its input or weight; the meta kernels do not heed it."""

    def convolved(args, options, out):
        formats = {_compat.suggest_memory_format(tensor) for tensor in args[first : first + 2]}
        last = formats & {torch.channels_last, torch.channels_last_3d}
        layout = last.pop() if last else torch.contiguous_format

        def laid_out(tensor):
            if tensor is None or tensor.dim() not in (4, 5):
                return tensor
            return _compat.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=layout)

        return laid_out(out) if isinstance(out, torch.Tensor) else tuple(map(laid_out, out))

    return convolved


def _within(numel: int, out):
    """This result at the beginning of memory of so many numbers."""
    memory = _compat.empty_strided((numel,), (1,), dtype=out.dtype, device="meta")
    return memory.as_strided(out.shape, out.stride())


def _folded(args, options, out):
    """The kernel makes it as large as its input and then gives it its shape; memory that is left over stays (cuda/Col2Im.cu)."""
    return _within(args[0].numel(), out) if args[0].numel() > out.numel() else out


def _loss(reduction_at: int) -> Callable:
    """The loss of each number is worked out in the memory of the result, which is then one number (Loss.cpp, cuda/Loss.cu)."""

    def loss(args, options, out):
        reduction = args[reduction_at] if len(args) > reduction_at else options.get("reduction", MEAN)
        numel = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return _within(numel, out) if reduction != NONE and numel > 1 else out

    return loss


def _as_type(tensor, out):
    if out.dtype is tensor.dtype:
        return out
    return _compat.empty_strided(out.shape, out.stride(), dtype=tensor.dtype, device="meta")


def _typed_as(position: int) -> Callable:
    return lambda args, options, out: _as_type(args[position], out)


def _soft_margin(args, options, out):
    """Of the input's type, whatever the target's."""
    return _loss(2)(args, options, _as_type(args[0], out))


def _batch_norm(args, options, out):
    """Nothing is kept of running figures that are used as they are."""
    return out if args[5] else (out[0], *(figure.new_empty(0) for figure in out[1:]))


def _group_norm(args, options, out):
    """Figures are of single precision beside weights that are (param_scalar_type in cpu/mixed_data_type.h, which CUDA asks, too)."""
    mixed = next((weight for weight in args[1:3] if weight is not None and weight.dtype is not args[0].dtype), out[1])
    return out[0], *(_as_type(mixed, figure) for figure in out[1:])


def _norm_backward(args, options, out):
    """The gradient has its input's type and layout."""
    return None if out[0] is None else torch.empty_like(args[1]), *out[1:]


def _batch_norm_backward(args, options, out):
    """The same; contiguous where running figures are used as they are (`cuda_differences.LAYOUTS`)."""
    first, *others = _norm_backward(args, options, out)
    return first if first is None or args[7] else first.contiguous(), *others


CORRECTIONS: dict = {
    **dict.fromkeys(cuda_differences.FUNCS, lambda args, options, out: out.contiguous()),
    aten.convolution.default: _convolved(0),
    aten._convolution.default: _convolved(0),
    aten.convolution_backward.default: _convolved(1),
    aten.col2im.default: _folded,
    aten.mse_loss.default: _loss(2),
    aten.smooth_l1_loss.default: _loss(2),
    aten.binary_cross_entropy.default: _loss(3),
    aten.huber_loss.default: _typed_as(0),
    aten.soft_margin_loss.default: _soft_margin,
    aten.mse_loss_backward.default: _typed_as(1),
    aten.smooth_l1_loss_backward.default: _typed_as(1),
    aten.soft_margin_loss_backward.default: _typed_as(1),
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _norm_backward,
}
