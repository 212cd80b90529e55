"""Operations that multiply: their floating-point operations, by formulas of `torch.utils.flop_counter` or of our own, the bytes that they move,
and the seconds that `kernels` makes of them: products of matrices, convolutions, attention, recurrent layers."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from virtualgpu import _compat
from virtualgpu.hardware.datasheet import DTYPES, FLOAT32, TF32
from virtualgpu.timing import attention, convolutions
from virtualgpu.timing.kernels import Kernels, Product, vector_width

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten._convolution.default, aten.convolution_backward.default}
RECURRENT = {aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default}
OF_CUDNN = CONVOLUTIONS | RECURRENT
WRITE_ONLY = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default}
STEP = 9e-6  # of a recurrent layer, one step over time: two kernels that wait for each other (9.5 us on an H100 by cuDNN 9.19)


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
    if tensor.layout is torch.strided:
        return []
    with _compat.without_dispatch():
        if tensor.layout is torch.sparse_coo:
            return _compat.coo_parts(tensor)
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


KEYS = {getattr(torch, name): name for name in DTYPES if name != TF32}
PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def rate(func, tensors: Iterable[torch.Tensor]) -> str:
    """The key into Spec.rates: the tensors' floating-point type, or TF32 where PyTorch's settings allow it."""
    dtypes = [tensor.dtype for tensor in tensors]
    of_parts = (PARTS[dtype] for dtype in dtypes if dtype in PARTS)  # no card has a rate of its own for complex numbers
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), None) or next(of_parts, torch.float32)
    if dtype != torch.float32:
        return KEYS.get(dtype, FLOAT32)
    return (
        TF32 if _compat.in_tf32(tf32_switch(func)) else FLOAT32
    )  # a card that has no such rate falls back to that of float32


def tf32_switch(func) -> str:
    """Which of PyTorch's settings decides whether this operation may round float32 to TF32."""
    return "conv" if func in CONVOLUTIONS else "rnn" if func in RECURRENT else "matmul"


def seconds(
    kernels: Kernels, name: str, args, tensors, flops: float, moved: float, key, fraction: float = 1.0
) -> float:
    """One kernel, or the few that the operation called `name` is made of. tensors: all that it reads and writes. flops, moved: by their
    counts. key: into Spec.rates. fraction: of the FLOPs, where values leave some out."""
    rule = None if kernels.peak else RULES.get(name)
    if rule is None:
        return kernels.plain(flops * fraction, moved, key)
    return rule(kernels, args, tensors, flops * fraction, moved, key)


def _matrices(first: int, kernels: Kernels, args, tensors, flops, moved, key) -> float:
    """[count, rows, length] times [count, length, columns], from argument `first` on."""
    lhs, rhs = args[first], args[first + 1]
    if lhs.layout is not torch.strided or rhs.layout is not torch.strided:
        # as cuSPARSE: each number of the sparse matrix with a row of the other, which is fetched for it; `flops` are of dense ones
        sparse, other = (lhs, rhs) if lhs.layout is not torch.strided else (rhs, lhs)
        held = parts(sparse)[-1].numel()
        fetched = held * other.shape[-1 if sparse is lhs else -2] * other.itemsize
        return kernels.plain(flops * held / max(sparse.numel(), 1), moved + fetched, key)
    count = (lhs.shape[0] if lhs.dim() == 3 else 1) * (4 if lhs.is_complex() else 1)
    rows, length, columns = lhs.shape[-2], lhs.shape[-1], rhs.shape[-1]
    widths = columns, max(lhs.stride()[-2:]), max(rhs.stride()[-2:])  # of rows, in numbers
    loaded = vector_width(lhs.itemsize, *widths)
    along = (lhs.stride(-1) == 1) + (rhs.stride(-2) == 1)
    bias = first == 1 and args[0].dim() == 1
    product = Product(count, rows, columns, length, key, moved, loaded, along=along, bias=bias)
    return kernels.spec.kernel + kernels.busy(product)


def _recurrent(passes: int, layers_at: int, kernels: Kernels, args, tensors, flops, moved, key) -> float:
    """layers_at: where the number of layers stands among the arguments; batch_first comes next."""
    layers, batch_first = args[layers_at : layers_at + 2]
    steps = args[0].shape[1 if batch_first else 0] if args[0].dim() == 3 else 1
    return kernels.plain(flops, moved, key) + passes * layers * steps * STEP


def recurrent(x, weights, *args, out_val=None, **kwargs) -> int:
    """x [time, batch, features] or, of a packed sequence, [rows, features]: one product with each weight matrix a row."""
    return 2 * x.shape[:-1].numel() * sum(weight.numel() for weight in weights if weight.dim() == 2)


# Operations that torch.utils.flop_counter does not know, or counts wrongly; a version of PyTorch may lack one. Of a recurrent layer, the gradients
# of what went in and of the weights are a product each of its size.
MORE: dict[str, Callable] = {
    "convolution": convolutions.forward_flops,
    "_convolution": convolutions.forward_flops,
    "_slow_conv2d_forward": convolutions.slow_forward_flops,
    "convolution_backward": convolutions.backward_flops,
    "_native_multi_head_attention": attention.multi_head,
    "_transformer_encoder_layer_fwd": attention.encoder_layer,
    "_scaled_dot_product_flash_attention_for_cpu": attention.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention.attention_backward,
    "mkldnn_rnn_layer": lambda x, *args, **kwargs: recurrent(x, args[:2]),
    "mkldnn_rnn_layer_backward": lambda x, *args, **kwargs: 2 * recurrent(x, args[:2]),
    "_cudnn_rnn": recurrent,
    "_cudnn_rnn_backward": lambda *args, **kwargs: 2 * recurrent(*args, **kwargs),
}
FORMULAS = {getattr(aten, name): counts for name, counts in MORE.items() if hasattr(aten, name)}
ATTENTION = ("flash", "efficient", "cudnn")
RULES: dict[str, Callable] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm"), partial(_matrices, 0)),
    **dict.fromkeys(("addmm", "baddbmm"), partial(_matrices, 1)),
    "convolution": convolutions.forward_seconds,
    "_convolution": convolutions.forward_seconds,
    "convolution_backward": convolutions.backward_seconds,
    **{f"_scaled_dot_product_{by}_attention": attention.rule("forward", by) for by in ATTENTION},
    **{f"_scaled_dot_product_{by}_attention_backward": attention.rule("backward", by) for by in ATTENTION},
    "flex_attention": attention.rule("forward"),
    "flex_attention_backward": attention.rule("backward"),
    "_cudnn_rnn": partial(_recurrent, 1, 9),
    "_cudnn_rnn_backward": partial(_recurrent, 2, 13),
}
