"""What cuDNN's convolutions take of the GPU's memory while they run.

Tensor cores read pictures with their channels last. Where these lie first, cuDNN lays input, weights and result out anew in a workspace,
and the gradients' likewise; the gradient of the weights is added up from several parts. No source of NVIDIA's says so: measured on an
H100, cuDNN 9.19, PyTorch 2.11, 2026-11-26, in float32 (TF32), float16 and bfloat16. Kernels of one place, and those that do not overlap,
took nothing but the parts of the weights' gradient; one filter for each channel nothing at all. What channels_last takes, up to a third of
that in a backward pass, is not modelled.
"""

import torch

from virtualgpu import _compat
from virtualgpu.engine.halves import HALVES

AMPERE = (8, 0)
# Of the weights' gradient: 16 parts for 256 x 64 filters of one place, 15 for 64 x 64 of 3 x 3, which take 1.9 to 2.1 MiB
PARTS, ALL_PARTS = 16, 2 << 20
PLACES = 1024  # of all pictures, at least, for each part of filters of one place; our own figure
EACH = 16


def forward(args, kwargs, out, gpu) -> list[int]:
    """convolution: one block, of input, weights and result; float32 writes the result of one or two dimensions where it belongs."""
    input, weight, transposed = args[0], args[1], args[6]
    if not _on_tensor_cores(input, args[8], gpu) or not _laid_out_anew(input, weight, args[3]):
        return []
    direct = (
        input.dtype is torch.float32 and input.dim() < 5 and not transposed and args[8] == 1 and input.shape[1] % 4 == 0
    )
    return [input.nbytes + weight.nbytes + (0 if direct else out.nbytes) + EACH]


def backward(args, kwargs, out, gpu) -> list[int]:
    """convolution_backward: the larger of two, for the gradients of input and weights, which come one after the other."""
    gradient, input, weight, wanted = args[0], args[1], args[2], args[10]
    if not _on_tensor_cores(input, args[9], gpu):
        return []
    if not _laid_out_anew(input, weight, args[4]):
        number = min(PARTS, gradient.numel() // gradient.shape[1] // PLACES)
        parts = min(number * weight.numel() * 4, ALL_PARTS)
        return [parts] if wanted[1] and number > 1 and weight.shape[2:].numel() == 1 else []
    pictures = input.nbytes + gradient.nbytes
    sizes = [pictures + weight.nbytes] * wanted[0] + [pictures + ALL_PARTS] * wanted[1]
    return [max(sizes)] if sizes else []


def _on_tensor_cores(input, groups: int, gpu) -> bool:
    if gpu.spec.capability < AMPERE or not torch.backends.cudnn.enabled or not input.numel():
        return False
    if input.dtype not in HALVES and not (input.dtype is torch.float32 and _compat.in_tf32("conv")):
        return False
    return groups == 1 or groups != input.shape[1]  # otherwise one filter for each channel


def _laid_out_anew(input, weight, strides) -> bool:
    kernel = weight.shape[2:]
    if all(size <= stride for size, stride in zip(kernel, list(strides) * (len(kernel) // len(strides)), strict=True)):
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    return last is None or not any(
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() for tensor in (input, weight)
    )
