"""torch._scaled_mm: cuBLASLt multiplies float8 matrices of rows by those of columns alone, before Blackwell; the CPU's kernel takes any."""

import functools

import torch

from virtualgpu.engine.allocation import gpu_of

aten = torch.ops.aten
ANY_LAYOUT = (10, 0)  # capability from which it takes all


def _checked(func):
    @functools.wraps(func)
    def on_gpu(left, right, *args, **kwargs):
        """Raises CUDA's RuntimeError for other layouts. Call it untracked."""
        gpu = gpu_of(left)
        fits = left.stride(1) == 1 and right.stride(0) == 1
        if gpu is not None and not fits and gpu.spec.capability < ANY_LAYOUT:
            raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")
        return func(left, right, *args, **kwargs)

    return on_gpu


OPERATIONS = {func: _checked(func) for func in (aten._scaled_mm.default, aten._scaled_mm.out)}
