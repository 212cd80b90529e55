"""torch.histc of whole numbers: CUDA counts them, the CPU's kernel takes floating point alone. Mixtures of experts count tokens so.

As _histc_cuda_template does (aten/src/ATen/native/cuda/SummaryOps.cu): a number's bin is found in int64, and the last bin has both its ends.
"""

import torch

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
    places = ((inside - low) * bins).div_(high - low, rounding_mode="floor").clamp_(max=bins - 1)
    counts = torch.bincount(places, minlength=bins).to(tensor.dtype)
    return counts if out is None else aten.copy_.default(aten.resize_.default(out, counts.shape), counts)


OPERATIONS = dict.fromkeys((aten.histc.default, aten.histc.out), on_gpu)
