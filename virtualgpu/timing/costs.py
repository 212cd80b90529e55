"""What one operation costs: its floating-point operations, by formulas of `torch.utils.flop_counter` or of our own, and the bytes it moves."""

from collections.abc import Callable, Iterable

import torch

from virtualgpu import _compat
from virtualgpu.hardware.datasheet import DTYPES, FLOAT32, TF32
from virtualgpu.timing import convolutions
from virtualgpu.timing.attention import attention, attention_backward, encoder_layer, multi_head

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten._convolution.default, aten.convolution_backward.default}
RECURRENT = {aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default}
OF_CUDNN = CONVOLUTIONS | RECURRENT


def formula(func) -> Callable | None:
    """What counts the FLOPs of an operation, called with its arguments and out_val; None where they do not matter."""
    return FORMULAS.get(_compat.packet(func)) or _compat.flop_formula(func)


def moved(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that these tensors take to read or write once; an expanded one is no larger than its storage."""
    try:
        total = 0
        for tensor in tensors:
            nbytes, held = tensor.nbytes, tensor.untyped_storage().nbytes()
            total += nbytes if nbytes < held else held
        return total
    except (NotImplementedError, RuntimeError):  # a sparse tensor: its parts, each
        return moved([part for tensor in tensors for part in parts(tensor) or [tensor]])


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of, values last; none for any other tensor."""
    layout = tensor.layout
    if layout is torch.strided or layout not in SPARSE:
        return []
    with _compat.without_dispatch():
        if layout is torch.sparse_coo:
            return _compat.coo_parts(tensor)
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def rate(func, tensors: Iterable[torch.Tensor]) -> str:
    """The key into Spec.rates: the tensors' floating-point type, or TF32 where PyTorch's settings allow it."""
    dtype = next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), None)
    if dtype is None:  # no card has a rate of its own for complex numbers: that of their parts
        dtype = next((PARTS[tensor.dtype] for tensor in tensors if tensor.dtype in PARTS), torch.float32)
    if dtype != torch.float32:
        return KEYS.get(dtype, FLOAT32)
    allowed = _compat.in_tf32("conv" if func in CONVOLUTIONS else "rnn" if func in RECURRENT else "matmul")
    return TF32 if allowed else FLOAT32  # a card that has no such rate falls back to that of float32


KEYS = {getattr(torch, name): name for name in DTYPES if name != TF32}
PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def _rnn_layer(x, w_ih, w_hh, *args, out_val=None, **kwargs) -> int:
    """x [time, batch, features]: one product with each weight matrix a time step."""
    return 2 * x.shape[0] * x.shape[1] * (w_ih.numel() + w_hh.numel())


def _rnn_layer_backward(x, w_ih, w_hh, *args, out_val=None, **kwargs) -> int:
    return 2 * _rnn_layer(x, w_ih, w_hh)


def recurrent(x, weights, *args, out_val=None, **kwargs) -> int:
    """x [time, batch, features] or, of a packed sequence, [rows, features]: one product with each weight matrix a row."""
    return 2 * x.shape[:-1].numel() * sum(weight.numel() for weight in weights if weight.dim() == 2)


def recurrent_backward(x, weights, *args, out_val=None, **kwargs) -> int:
    """Two products of that size instead of one: the gradients of what went in, and of the weights."""
    return 2 * recurrent(x, weights)


# operations that torch.utils.flop_counter does not know, or counts wrongly; a version of PyTorch may lack one
MORE: dict[str, Callable] = {
    "convolution": convolutions.forward_flops,
    "_convolution": convolutions.forward_flops,
    "_slow_conv2d_forward": convolutions.slow_forward_flops,
    "convolution_backward": convolutions.backward_flops,
    "_native_multi_head_attention": multi_head,
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "mkldnn_rnn_layer": _rnn_layer,
    "mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "_cudnn_rnn": recurrent,
    "_cudnn_rnn_backward": recurrent_backward,
}
FORMULAS = {getattr(aten, name): counts for name, counts in MORE.items() if hasattr(aten, name)}
WRITE_ONLY = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default}
