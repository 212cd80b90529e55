"""What the fused kernels of attention return, as shapes in the layout that they have on a GPU, and what they hold while they run.

Shapes as in `sdpa`. A `call` has query, key, value and bias, the arguments of a kernel.
"""

import torch

from virtualgpu.engine.sdpa_backends import HALVES


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _meta(tensor: torch.Tensor, shape, dtype=None, order=None) -> torch.Tensor:
    """A shape, dense, its dimensions in memory in this order, the last one innermost."""
    order = order or tuple(range(len(shape)))
    return torch.empty_permuted(tuple(shape), order, dtype=dtype or tensor.dtype, device="meta")


BY_TOKENS = (0, 2, 1, 3)  # [batch, length, heads, size] in memory


def _like(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """As at::empty_like lays out, with another last dimension: the order of the tensor's own dimensions."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim)) if tensor.numel() else None
    return _meta(tensor, (*tensor.shape[:-1], width), order=order and tuple(order))


def results(call, efficient: bool, summed: bool) -> list[torch.Tensor]:
    """[out, logsumexp] without numbers. The flash kernels' out has the query's layout, the memory-efficient one's its own."""
    q, width = call.query, call.value.shape[-1]
    batch, heads, length, _ = q.shape
    if not efficient:
        return [_like(q, width), _meta(q, (batch, heads, length), torch.float32)]
    padded = _rounded(length, 32) if summed else 0
    return [_meta(q, (batch, heads, length, width), order=BY_TOKENS), _meta(q, (batch, heads, padded), torch.float32)]


def gradients(call, efficient: bool) -> list[torch.Tensor]:
    """Those of query, key and value, without numbers."""
    if efficient:
        return [_meta(tensor, tensor.shape, order=BY_TOKENS) for tensor in call.inputs[:3]]
    return [_like(tensor, tensor.shape[-1]) for tensor in call.inputs[:3]]


def gradient_of_bias(bias: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias: its rows are rounded up to 16 numbers."""
    rows, width = bias.shape[:-1], bias.shape[-1]
    return _meta(bias, (*rows, _rounded(width, 16)))[..., :width]


def laid_out(shape: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """These values in the layout of this shape."""
    if values.stride() == shape.stride() and values.dtype is shape.dtype:
        return values
    storage = torch.empty(shape.untyped_storage().nbytes() // shape.element_size(), dtype=shape.dtype)
    return storage.as_strided(shape.shape, shape.stride()).copy_(values)


def scratch(call, flash: bool, efficient: bool, spec) -> list[int]:
    """Bytes of each block that a backward kernel takes and gives back."""
    q, k, v = call.inputs[:3]
    batch, heads, length, size = q.shape
    if flash:
        rows, width = _rounded(length, 128), _rounded(size, 32 if size <= 128 else 64)
        splits = 1
        if torch.are_deterministic_algorithms_enabled():  # blocks of keys add up apart
            splits = -(-spec.processors // (batch * heads))
        blocks = [batch * heads * rows * 4, splits * batch * rows * heads * width * 4]  # softmax_d, dq_accum
        if heads != k.shape[1]:  # gradients of key and value for each head of the query, before they are added up
            blocks += [batch * k.shape[2] * heads * tensor.shape[-1] * k.element_size() for tensor in (k, v)]
        return blocks
    if efficient:
        delta = batch * heads * length * 4
        if q.dtype in HALVES:  # the query's gradient is added up in single precision
            return [delta, batch * heads * _rounded(length, 32) * _rounded(size, 32) * 4]
        return [batch * heads * length * v.shape[-1] * 4, delta]  # gradient times out, summed over the head
    return []
