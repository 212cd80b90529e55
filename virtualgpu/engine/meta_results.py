"""What an operation returns in a dry run, where PyTorch's meta kernel says something else than its kernels do: a layout, a type, a size, or
how large the storage behind a result is."""

import torch

from virtualgpu import _compat
from virtualgpu.engine import half_fft, layouts, wider


def corrected(op, args, kwargs, out):
    """The results of the meta kernel for these shapes, as the kernels give them. Call it untracked."""
    correct = CORRECTIONS.get(op.func)
    return out if correct is None else correct(args, kwargs, out)


def _convolved(first):
    def convolved(args, kwargs, out):
        """Channels come last in what a convolution returns where they do in its input or weight; the meta kernels do not heed it."""
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


def _folded(args, kwargs, out):
    """The kernel makes it as large as its input and then gives it its shape; memory that is left over stays (cuda/Col2Im.cu)."""
    return _within(args[0].numel(), out) if args[0].numel() > out.numel() else out


def _loss(reduction_at: int):
    def loss(args, kwargs, out):
        """The loss of each number is worked out in the memory of the result, which is then one number (Loss.cpp, cuda/Loss.cu)."""
        reduction = args[reduction_at] if len(args) > reduction_at else kwargs.get("reduction", MEAN)
        numel = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return _within(numel, out) if reduction != NONE and numel > 1 else out

    return loss


def _like_input(args, kwargs, out):
    return _as_type(args[0], out)


def _soft_margin(args, kwargs, out):
    """Of the input's type, whatever the target's."""
    return _loss(2)(args, kwargs, _as_type(args[0], out))


def _loss_backward(args, kwargs, out):
    return _as_type(args[1], out)


def _as_type(tensor, out):
    if out.dtype is tensor.dtype:
        return out
    return _compat.empty_strided(out.shape, out.stride(), dtype=tensor.dtype, device="meta")


def _contiguous(args, kwargs, out):
    return out if out.is_contiguous() else out.contiguous()


def _batch_norm(args, kwargs, out):
    """Nothing is kept of running figures that are used as they are."""
    if args[5]:
        return out
    return out[0], *(figure.new_empty(0) for figure in out[1:])


def _group_norm(args, kwargs, out):
    """Figures are of single precision beside weights that are (param_scalar_type in cpu/mixed_data_type.h, which CUDA asks, too)."""
    mixed = next((weight for weight in args[1:3] if weight is not None and weight.dtype is not args[0].dtype), out[1])
    return out[0], *(_as_type(mixed, figure) for figure in out[1:])


def _batch_norm_backward(args, kwargs, out):
    """As layouts has it."""
    first, *others = _norm_backward(args, kwargs, out)
    return first if first is None or args[7] else first.contiguous(), *others


def _norm_backward(args, kwargs, out):
    """The gradient has its input's type and layout."""
    first = out[0]
    return None if first is None else torch.empty_like(args[1]), *out[1:]


def _nll_loss(tensor, target, *rest):
    """Its kernel for shapes wants int64, or calls it gather's."""
    return aten.nll_loss_forward.default(tensor, target.long(), *rest)


def _masked_fill(tensor, mask, value):
    """The value may be one number of the host's."""
    return aten.masked_fill.Tensor(tensor, mask, torch.empty_like(value, device="meta"))


def _where(condition, *tensors):
    """A mask may be of uint8."""
    return aten.where.self(condition.bool(), *tensors)


def _as_first(tensor, *rest):
    return torch.empty_like(tensor)


aten = torch.ops.aten
# what is asked for a shape in place of the operation
INSTEAD = {
    **half_fft.OPERATIONS,
    **wider.OPERATIONS,
    aten.nll_loss_forward.default: _nll_loss,
    aten.masked_fill.Tensor: _masked_fill,
    aten.where.self: _where,
    # draws and their derivatives, one for each number of the first argument
    aten._sample_dirichlet.default: _as_first,
    aten._dirichlet_grad.default: _as_first,
    aten._standard_gamma.default: _as_first,
    aten._standard_gamma_grad.default: _as_first,
    aten.poisson.default: _as_first,
    aten.binomial.default: _as_first,
}
NONE, MEAN = 0, 1
CORRECTIONS = {
    **dict.fromkeys(layouts.FUNCS, _contiguous),
    aten.convolution.default: _convolved(0),
    aten._convolution.default: _convolved(0),
    aten.convolution_backward.default: _convolved(1),
    aten.col2im.default: _folded,
    aten.mse_loss.default: _loss(2),
    aten.smooth_l1_loss.default: _loss(2),
    aten.binary_cross_entropy.default: _loss(3),
    aten.huber_loss.default: _like_input,
    aten.soft_margin_loss.default: _soft_margin,
    aten.mse_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten.soft_margin_loss_backward.default: _loss_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _norm_backward,
}
