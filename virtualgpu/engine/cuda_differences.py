"""Kernels that differ on CUDA: histograms of whole numbers, types that the CPU lacks, contiguous results, derivatives in place."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.storage import allocation_of, label

# -- torch.histc of whole numbers: CUDA counts them, the CPU's kernel takes floating point alone. Mixtures of experts count tokens so.
#
# As _histc_cuda_template does (aten/src/ATen/native/cuda/SummaryOps.cu): a number's bin is found in int64, and the last bin has both its ends.

aten = torch.ops.aten
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def on_gpu(tensor, bins=100, min=0, max=0, *, out=None):
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


HISTOGRAMS = dict.fromkeys((aten.histc.default, aten.histc.out), on_gpu)


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
