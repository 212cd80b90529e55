"""Layer norm of half precision, whose mean and deviation a GPU keeps in single precision, in which it adds up (acc_type in
cuda/layer_norm_kernel.cu).

The CPU's kernel rounds them where the weights are half, too, and adds up the weights' gradients in half. It works in single precision here
as far as it has to; the copies are the host's, and nothing of them lies on the GPU.
"""

import torch

from virtualgpu.engine.halves import HALVES

aten = torch.ops.aten


def forward(input, normalized_shape, weight, bias, eps):
    """native_layer_norm. Call it untracked."""
    if not _concerns(input, weight, bias):
        return aten.native_layer_norm.default(input, normalized_shape, weight, bias, eps)
    weight = torch.ones(normalized_shape) if weight is None else weight.float()
    return aten.native_layer_norm.default(input, normalized_shape, weight, None if bias is None else bias.float(), eps)


def backward(gradient, input, normalized_shape, mean, rstd, weight, bias, mask):
    """native_layer_norm_backward, of what `forward` gave, each gradient rounded once. Call it untracked."""
    kernel = aten.native_layer_norm_backward.default
    if mean.dtype is not torch.float32 or not _concerns(input, weight, bias):
        return kernel(gradient, input, normalized_shape, mean, rstd, weight, bias, mask)
    weights = [None if other is None else other.float() for other in (weight, bias)]
    grads = kernel(gradient.float(), input.float(), normalized_shape, mean, rstd, *weights, mask)
    return tuple(None if grad is None else grad.to(input.dtype) for grad in grads)


def _concerns(input, weight, bias) -> bool:
    """Half input, with half weights or none."""
    return input.dtype in HALVES and all(other is None or other.dtype is input.dtype for other in (weight, bias))


OPERATIONS = {aten.native_layer_norm.default: forward, aten.native_layer_norm_backward.default: backward}
