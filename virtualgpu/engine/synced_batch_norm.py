"""SyncBatchNorm's operations, which PyTorch has for CUDA alone, in plain ones (aten/src/ATen/native/cuda/Normalization.cu).

`lacking` registers them.
"""

from virtualgpu.engine.halves import exact


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


KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_gather_stats": _gather_stats,
    "batch_norm_gather_stats_with_counts": _gather_stats_with_counts,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}
