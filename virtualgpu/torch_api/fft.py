"""torch.fft of float16 with numbers: before it comes to dispatch, C++ asks where the tensor is, and would refuse it as the CPU's.

It is carried out in single precision, and rounded; on a virtual GPU that is three kernels, where cuFFT has one.
"""

import torch

from virtualgpu import _compat
from virtualgpu.engine.half_precision import NARROW, WIDE, check
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.torch_api.patches import Patches, standing_in

OF_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
OF_TWO = tuple(f"{name}2" for name in OF_ONE)
OF_ALL = tuple(f"{name}n" for name in OF_ONE)


def install(machine: Machine, patches: Patches) -> None:
    """Replace the transforms of torch.fft."""
    for name in (*OF_ONE, *OF_TWO, *OF_ALL):
        value = standing_in(getattr(torch.fft, name), _transform, machine, name)
        patches.undo(_compat.register_as_builtin(value, f"aten::fft_{name}"))
        patches.replace(torch.fft, name, value)


def _transform(machine, name, original, input, *args, **kwargs):
    wide = WIDE.get(input.dtype) if isinstance(input, torch.Tensor) else None
    if wide is None or machine.dry or machine.local.bypass or gpu_of(input) is None or kwargs.get("out") is not None:
        return original(input, *args, **kwargs)
    check(_sizes(name, input, *args, **kwargs))
    out = original(input.to(wide), *args, **kwargs)
    return out.to(NARROW[out.dtype])


def _sizes(name: str, input, size=None, dim=None, norm=None, *, n=None, s=None, **kwargs) -> list[int]:
    """Of the signal, along each dimension that is transformed."""
    if name in OF_ONE:
        size = n if size is None else size
        size, dims = None if size is None else [size], [-1 if dim is None else dim]
    else:
        size = s if size is None else size
        dims = list(dim) if dim is not None else [-2, -1] if name in OF_TWO else None
        if dims is None:
            dims = list(range(input.dim())) if size is None else list(range(-len(size), 0))
    sizes = [input.shape[axis] for axis in dims] if size is None else list(size)
    if size is None and name.startswith(("irfft", "hfft")):
        sizes[-1] = 2 * (sizes[-1] - 1)  # of which a half is given
    return [input.shape[axis] if length == -1 else length for length, axis in zip(sizes, dims, strict=True)]
