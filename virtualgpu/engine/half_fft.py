"""Fourier transforms of float16: cuFFT has them for sizes that are powers of two, the CPU has none. Carried out in single precision, and rounded.

As _exec_fft and CuFFTConfig do (aten/src/ATen/native/cuda/SpectralOps.cpp, CuFFTPlanCache.h).
"""

import torch

aten = torch.ops.aten
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


OPERATIONS = {
    aten._fft_r2c.default: _of_halves(aten._fft_r2c.default),
    aten._fft_c2c.default: _of_halves(aten._fft_c2c.default),
    aten._fft_c2r.default: _of_halves(aten._fft_c2r.default, 1),
}
