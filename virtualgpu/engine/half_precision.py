"""Half precision and float8 as a GPU computes them, carried out in float32: products, grids, Fourier transforms, layer norm."""

import torch
from torch import Tensor

from virtualgpu import _compat

# -- Products, convolutions and attention of float16, grids sampled in half precision, and what the CPU has no half kernel of: carried out in float32, and the result rounded.
#
# The CPU's own kernels for float16 take up to a hundred times as long as those for float32 where the processor has no instructions for it,
# and some of them add up in float16. A GPU's add up in float32, as is done here, on every machine alike. The float32 copies are the
# host's: nothing of them lies on the GPU, and its time is that of float16. What costs no more in float16 keeps the CPU's kernel.
#
# grid_sample: the CPU's kernel works out where to look in float16 or bfloat16 itself, and is off by a fifth of a pixel's value where a GPU's
# (opmath_t in aten/src/ATen/native/cuda/GridSampler.cu) is right but for the last bit.

aten = torch.ops.aten
STRIDED = torch.strided
HALF, HALVES = torch.float16, (torch.float16, torch.bfloat16)

PRODUCTS = {
    getattr(packet, form) for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm) for form in ("default", "out")
}
PRODUCTS |= {aten.addmm_.default, aten.baddbmm_.default, aten._addmm_activation.default}
PRODUCTS |= {aten.convolution.default, aten.convolution_backward.default}
GRIDS = {getattr(aten, f"grid_sampler_{dims}d{way}").default for dims in (2, 3) for way in ("", "_backward")}
# the CPU has no kernel of them in half precision
ABSENT = {
    getattr(aten, f"{name}{way}").default
    for name in ("avg_pool3d", "multi_margin_loss", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    for way in ("", "_backward")
}
ABSENT |= {getattr(aten, f"multilabel_margin_loss{way}").default for way in ("", "_forward", "_backward")}
# of which types each is carried out so
IN_FLOAT32 = {**dict.fromkeys(PRODUCTS, (HALF,)), **dict.fromkeys(GRIDS | ABSENT, HALVES)}


def run(op, args, kwargs, tensors):
    """One of IN_FLOAT32, its first tensor of one of its types. Where others are not, it is PyTorch's to say what it thinks of that."""
    narrow = tensors[0].dtype
    if any(_is_other(tensor, narrow) or tensor.layout is not STRIDED for tensor in tensors):
        return op.func(*args, **kwargs)
    wide = accumulated_in()
    wide_args = [_to(value, narrow, wide) for value in args]
    wide_kwargs = {name: _to(value, narrow, wide) for name, value in kwargs.items()}
    out = op.func(*wide_args, **wide_kwargs)
    if not op.writes:
        return tuple(_to(entry, wide, narrow) for entry in out) if isinstance(out, tuple) else _to(out, wide, narrow)
    index, name = op.writes[0]
    target = kwargs[name] if name in kwargs else args[index]
    if target.shape != out.shape:
        aten.resize_.default(target, out.shape)
    return aten.copy_.default(target, out)


def _is_other(tensor: Tensor, narrow: torch.dtype) -> bool:
    """Of another type that may be multiplied? Whole numbers say which class it is."""
    return tensor.dtype is not narrow and (tensor.is_floating_point() or tensor.is_complex())


def accumulated_in() -> torch.dtype:
    """float32; float64 where the program lets the CPU multiply float32 with the precision of bfloat16, which is below float16's."""
    return torch.float64 if _compat.cpu_multiplies_in_bfloat16() else torch.float32


def exact(tensor: Tensor) -> Tensor:
    """What CUDA's norms reckon in: single precision for half."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def widened(tensor: Tensor) -> Tensor:
    """In float32, if it is of float16. Call it untracked."""
    return _to(tensor, HALF, accumulated_in())


def _to(value, source: torch.dtype, target: torch.dtype):
    """A tensor of the type `source` in the type `target`; anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype is not source:
        return value
    return aten._to_copy.default(value, dtype=target)


# -- Fourier transforms of float16: cuFFT has them for sizes that are powers of two, the CPU has none. Carried out in single precision, and rounded.
#
# As _exec_fft and CuFFTConfig do (aten/src/ATen/native/cuda/SpectralOps.cpp, CuFFTPlanCache.h).


WIDE = {torch.float16: torch.float32, torch.complex32: torch.complex64}
NARROW = {wide: narrow for narrow, wide in WIDE.items()}


def check(sizes) -> None:
    """Raises CUDA's RuntimeError for sizes that are not powers of two."""
    if any(size & (size - 1) for size in sizes):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size of"
            f"{list(sizes)}"
        )


def _of_halves(func, last_at: int | None = None):
    def on_gpu(tensor, dim, *args, **kwargs):
        """Raises CUDA's RuntimeError for other sizes. Call it untracked."""
        wide = WIDE.get(tensor.dtype)
        if wide is None or kwargs:  # out=
            return func(tensor, dim, *args, **kwargs)
        sizes = [tensor.shape[axis] for axis in dim]
        if last_at is not None:
            sizes[-1] = args[last_at]
        check(sizes)
        out = func(tensor.to(wide), dim, *args)
        return out.to(NARROW[out.dtype])

    return on_gpu


FFT = {
    aten._fft_r2c.default: _of_halves(aten._fft_r2c.default),
    aten._fft_c2c.default: _of_halves(aten._fft_c2c.default),
    aten._fft_c2r.default: _of_halves(aten._fft_c2r.default, 1),
}


# -- Layer norm of half precision, whose mean and deviation a GPU keeps in single precision, in which it adds up (acc_type in
# cuda/layer_norm_kernel.cu).
#
# The CPU's kernel rounds them where the weights are half, too, and adds up the weights' gradients in half. It works in single precision here
# as far as it has to; the copies are the host's, and nothing of them lies on the GPU.


def layer_norm(input, normalized_shape, weight, bias, eps):
    """native_layer_norm. Call it untracked."""
    if not _concerns(input, weight, bias):
        return aten.native_layer_norm.default(input, normalized_shape, weight, bias, eps)
    weight = torch.ones(normalized_shape) if weight is None else weight.float()
    return aten.native_layer_norm.default(input, normalized_shape, weight, None if bias is None else bias.float(), eps)


def layer_norm_backward(gradient, input, normalized_shape, mean, rstd, weight, bias, mask):
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


LAYER_NORM = {aten.native_layer_norm.default: layer_norm, aten.native_layer_norm_backward.default: layer_norm_backward}
