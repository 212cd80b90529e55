"""torch.use_deterministic_algorithms(True): CUDA's kernels that have no deterministic implementation, and say so.

The list is that of its documentation; the names are those of PyTorch's messages. What alerts on the CPU, too (put_, MaxUnpool), does so by
itself. reflection_pad2d_backward is in that list, and an H100 (PyTorch 2.11, 2026-11-26) carries it out.
"""

import warnings

import torch

MAX = 2  # embedding_bag's number of mode="max"


def _reduces(args, kwargs) -> bool:
    """scatter with reduce=, of a tensor; that of a number says nothing."""
    return "reduce" in kwargs and len(args) > 3 and isinstance(args[3], torch.Tensor)


# {operation of ATen: (name in the message, whether these arguments need it)}
ALERTS = {
    f"{name}_backward": (f"{name.removeprefix('_')}_backward_{end}", None)
    for end, names in {
        "cuda": "avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d fractional_max_pool2d fractional_max_pool3d "
        "grid_sampler_2d grid_sampler_3d",
        "out_cuda": "reflection_pad1d reflection_pad3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d",
        "gpu": "_ctc_loss",
    }.items()
    for name in names.split()
}
ALERTS |= {
    "nll_loss2d_forward": ("nll_loss2d_forward_out_cuda_template", None),
    "histc": ("_histc_cuda with floating point input", lambda args, kwargs: args[0].is_floating_point()),
    "bincount": ("_bincount_cuda", lambda args, kwargs: len(args) > 1 and args[1] is not None),
    "_embedding_bag_backward": ("embedding_bag_backward_cuda_max", lambda args, kwargs: args[8] == MAX),
    "put": ("put_", lambda args, kwargs: len(args) > 3 and args[3]),
    "put_": ("put_", lambda args, kwargs: len(args) > 3 and args[3]),
    "scatter": ("scatter_reduce_cuda_kernel", _reduces),
    "scatter_": ("scatter_reduce_cuda_kernel", _reduces),
    "median": ("median CUDA with indices output", lambda args, kwargs: len(args) > 1),
    "nanmedian": ("median CUDA with indices output", lambda args, kwargs: len(args) > 1),
}


def check(op, args, kwargs) -> None:
    """Raises PyTorch's RuntimeError for an operation in ALERTS, or warns, where `warn_only` was asked for."""
    name, needed = op.alert
    if needed is not None and not needed(args, kwargs):
        return
    message = (
        f"{name} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True"
    )
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(f"{message}, warn_only=True)'.", stacklevel=5)
        return
    raise RuntimeError(
        f"{message})'. You can turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's acceptable "
        "for your application."
    )
