"""What one operation costs: its floating-point operations, by the formulas of `torch.utils.flop_counter`, and the bytes it moves."""

from dataclasses import dataclass
from math import prod

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from helpers.virtual.specs import TF32

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward}


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs, bytes read and written, and the dtype whose rate applies."""

    flops: int
    nbytes: int
    dtype: object


def cost(func, args, kwargs, out) -> Cost:
    """The cost of out = func(*args, **kwargs), an operation of ATen on tensors of any device."""
    packet = func._overloadpacket
    formula = FORMULAS.get(packet) or flop_registry.get(packet)
    flops = formula(*args, **kwargs, out_val=out) if formula else 0
    tensors = {id(leaf): leaf for leaf in tree_iter((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
    nbytes = sum(_moved(tensor) for tensor in tensors.values())
    if func in WRITE_ONLY:
        nbytes = _moved(args[0])
    dtype = next((t.dtype for t in tensors.values() if t.dtype.is_floating_point), torch.float32)
    if packet in CONVOLUTIONS and dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        dtype = TF32  # a card without it has no such rate, and falls back to that of float32
    elif flops and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        dtype = TF32
    return Cost(flops, nbytes, dtype)


def _moved(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; an expanded one is read from memory once."""
    numbers = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return numbers * tensor.element_size()


def _attention(query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad, query, key, value, *args, out_val=None, **kwargs) -> int:
    """Five products of that size instead of two: scores again, and the gradients of scores, query, key and value."""
    return sdpa_flop_count(query.shape, key.shape, value.shape) * 5 // 2


def _rnn_layer(x, w_ih, w_hh, *args, out_val=None, **kwargs) -> int:
    """x [time, batch, features]: one product with each weight matrix a time step."""
    return 2 * x.shape[0] * x.shape[1] * (w_ih.numel() + w_hh.numel())


def _rnn_layer_backward(x, w_ih, w_hh, *args, out_val=None, **kwargs) -> int:
    return 2 * _rnn_layer(x, w_ih, w_hh)


# operations that the CPU has and torch.utils.flop_counter does not know
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.mkldnn_rnn_layer_backward: _rnn_layer_backward,
}
WRITE_ONLY = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default}
