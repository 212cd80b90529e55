"""Kernels for shapes alone that PyTorch lacks: without them a dry run could not carry these operations out."""

import torch

aten = torch.ops.aten
_library = None


def install() -> None:
    """Register them, once, where PyTorch has none. They concern tensors of device "meta" alone."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        operation = getattr(aten, name, None)
        if operation is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.m.impl(name, "Meta", kernel)  # Library.impl refuses what decomposes; on a GPU that is one kernel


def _like_second(gradient, tensor, *rest, **options):
    """A gradient has the shape of what it is the gradient of."""
    return torch.empty_like(tensor)


def _geqrf(matrix):
    return torch.empty_like(matrix), matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:])))


KERNELS = {
    "mish_backward": _like_second,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "fractional_max_pool3d_backward": _like_second,
    "geqrf": _geqrf,
}
