"""Kernels that differ on CUDA: half precision in float32, histograms of whole numbers, types, layouts, derivatives in place."""

import torch
from torch import Tensor

from virtualgpu import _compat
from virtualgpu.engine.storage import allocation_of, label

aten = torch.ops.aten

# -- Products, convolutions and attention of float16, grids sampled in half precision, and what the CPU has no half kernel of: carried out in float32, and the result rounded.
#
# The CPU's own kernels for float16 take up to a hundred times as long as those for float32 where the processor has no instructions for it,
# and some of them add up in float16. A GPU's add up in float32, as is done here, on every machine alike. The float32 copies are the
# host's: nothing of them lies on the GPU, and its time is that of float16. What costs no more in float16 keeps the CPU's kernel.
#
# grid_sample: the CPU's kernel works out where to look in float16 or bfloat16 itself, and is off by a fifth of a pixel's value where a GPU's
# (opmath_t in aten/src/ATen/native/cuda/GridSampler.cu) is right but for the last bit.

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


def run_in_float32(op, args, kwargs, tensors):
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


def check_half_fft(sizes) -> None:
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
        check_half_fft(sizes)
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


# -- torch.histc of whole numbers: CUDA counts them, the CPU's kernel takes floating point alone. Mixtures of experts count tokens so.
#
# As _histc_cuda_template does (aten/src/ATen/native/cuda/SummaryOps.cu): a number's bin is found in int64, and the last bin has both its ends.

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def histc(tensor, bins=100, min=0, max=0, *, out=None):
    """How many numbers lie in each of `bins` equal parts of [min, max], of their own type. Raises RuntimeError as CUDA does. Call it untracked."""
    if tensor.dtype not in WHOLE:
        return torch.histc(tensor, bins, min, max, out=out)
    if bins <= 0:
        raise RuntimeError(f"bins must be > 0, but got {bins}")
    numbers, low, high = tensor.flatten().long(), int(min), int(max)
    if low == high and numbers.numel():
        low, high = numbers.min().item(), numbers.max().item()
    if low == high:
        low, high = low - 1, high + 1
    if low > high:
        raise RuntimeError("max must be larger than min")
    inside = numbers[(numbers >= low) & (numbers <= high)]
    bins_of_numbers = ((inside - low) * bins).div_(high - low, rounding_mode="floor").clamp_(max=bins - 1)
    counts = torch.bincount(bins_of_numbers, minlength=bins).to(tensor.dtype)
    return counts if out is None else aten.copy_.default(aten.resize_.default(out, counts.shape), counts)


HISTOGRAMS = dict.fromkeys((aten.histc.default, aten.histc.out), histc)


# -- Types that CUDA's kernels take and the CPU's do not: abs and trace of bool, nansum of complex numbers (measured on an H100, PyTorch 2.11).


def absolute(tensor):
    """Call it untracked, as the others."""
    return tensor.clone() if tensor.dtype is torch.bool else aten.abs.default(tensor)


def trace(tensor):
    """How many are true."""
    return aten.trace.default(tensor.long() if tensor.dtype is torch.bool else tensor)


def nansum(tensor, dim=None, keepdim=False, *, dtype=None):
    """A complex number of which one part is nan counts as nothing."""
    if not tensor.is_complex():
        return aten.nansum.default(tensor, dim, keepdim, dtype=dtype)
    return aten.sum.dim_IntList(tensor.masked_fill(tensor.isnan(), 0), dim, keepdim, dtype=dtype)


WIDER = {aten.abs.default: absolute, aten.trace.default: trace, aten.nansum.default: nansum}


# -- Kernels of CUDA that know no channels_last: what they return is contiguous, where the CPU's have the layout of their input.
#
# Pads: cuda/ReflectionPad.cu and ReplicationPadding.cu; roll: cuda/TensorTransformations.cu. The others are put together of operations on CUDA
# (PixelShuffle.cpp, ChanelShuffle.cpp). Time and bytes are the same; what comes after may take another kernel.


PADS = [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (2, 3)]
NAMES = [*PADS, *(f"{pad}_backward" for pad in PADS)]
NAMES += ["pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "channel_shuffle", "roll", "glu_backward"]


def _contiguous(func):
    def on_gpu(*args, **kwargs):
        """Call it untracked."""
        return func(*args, **kwargs).contiguous()

    return on_gpu


def _frozen(func):
    def on_gpu(*args):
        """The gradient of what came in is contiguous where running figures are used as they are (an H100, PyTorch 2.11). Call it untracked."""
        first, *others = func(*args)
        return first if first is None or args[7] else first.contiguous(), *others

    return on_gpu


FUNCS = [getattr(aten, name).default for name in NAMES]
LAYOUTS = {func: _contiguous(func) for func in FUNCS}
LAYOUTS[aten.native_batch_norm_backward.default] = _frozen(aten.native_batch_norm_backward.default)

# -- Derivatives that PyTorch's C++ works out in place of a tensor it has just made, but not where a dispatch mode is on.
#
# isTensorSubclassLike (aten/src/ATen/TensorSubclassLikeUtils.h) says yes to every tensor then, and the formulas of
# torch/csrc/autograd/FunctionsManual.cpp scatter into a copy: twice the memory. Such a result takes over the bytes of what it was made of here.


_SELECTS = ("Sort", "Topk", "Kthvalue", "Mode", "Median", "Nanmedian", "Max", "Min", "Cummax", "Cummin")
# Operation: the derivatives in which it is one in place of its first argument
NODES = {
    "scatter": {f"{name}Backward{number}" for name in _SELECTS for number in (0, 1)},
    "scatter_add": {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    "index_add": {"IndexSelectBackward0"},
    "index_put": {"IndexBackward0", "UnsafeIndexBackward0"},
    "put": {"TakeBackward0"},
    "masked_scatter": {"MaskedSelectBackward0"},
    "sub": {"BinaryCrossEntropyWithLogitsBackward0"},
    "mul": {"BinaryCrossEntropyWithLogitsBackward0"},
}


def take_over(op, args, out) -> None:
    """Let a new result have the memory of the first argument, where PyTorch would have written it there."""
    node = _compat.current_node()
    if node is None or node.name() not in NODES[op.name]:
        return
    first = args[0]
    allocation = allocation_of(first)
    if allocation is not None and allocation.gpu is not None and out.untyped_storage().nbytes() == allocation.nbytes:
        label(out, allocation)
