"""Kernels that PyTorch lacks for shapes alone, without which a dry run could not carry the operation out: what they return has no values.

`lacking` registers them.
"""

import torch


def _like_second(gradient, tensor, *rest, **options):
    """A gradient has the shape of what it is the gradient of."""
    return torch.empty_like(tensor)


def _close_as_second(gradient, tensor, *rest, **options):
    """The same, however that lies."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _geqrf(matrix):
    return torch.empty_like(matrix), matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:])))


def _like_first(tensor, *rest, **options):
    return torch.empty_like(tensor)


def _with_mask(tensor, *rest, **options):
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _in_place(*args, **options) -> None:
    """All that it returns is in what it was given."""


FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
KERNELS = {
    **dict.fromkeys((*FUSED, *(f"{name}.tensor_lr" for name in FUSED)), _in_place),
    "_transformer_encoder_layer_fwd": _like_first,  # PyTorch 2.11
    "mish_backward": _like_second,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "fractional_max_pool3d_backward": _like_second,
    "_ctc_loss_backward": _close_as_second,
    "geqrf": _geqrf,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
}
