"""Kernels that PyTorch has for CUDA and lacks elsewhere, registered where they are missing: each counts as one kernel of the GPU.

They are those of SyncBatchNorm and RMSNorm (`norms`) and products with `out_dtype`, in plain operations, for the
CPU, where the bytes of a virtual GPU really are, and for shapes alone; and those that are missing for shapes alone (`dry_run`). A
tensor that is the CPU's own is refused, as PyTorch refuses it.
"""

import functools

import torch

from virtualgpu import _compat, errors
from virtualgpu.engine import dry_run, norms
from virtualgpu.engine.storage import allocation_of, gpu_of


def install() -> None:
    """Register them where PyTorch has none."""
    for name, kernel in KERNELS.items():
        _compat.add_kernel(name, "CPU", _of_gpus(name, kernel))
        _compat.add_kernel(name, "Meta", kernel)
    for name, kernel in norms.RMS_NORM.items():  # the CPU's tensors, too, as PyTorch has it
        _compat.add_kernel(name, "CPU", kernel)
        _compat.add_kernel(name, "Meta", kernel)
    for name, kernel in dry_run.KERNELS.items():
        _compat.add_kernel(name, "Meta", kernel)


def _of_gpus(name: str, kernel):
    @functools.wraps(kernel)
    def on_gpu(first, *args, **kwargs):
        if gpu_of(first) is None:
            raise errors.without_cpu_kernel(name)
        return kernel(first, *args, **kwargs)

    return on_gpu


def record_stream(tensor, stream) -> None:
    """The memory of this tensor is not free before that stream is done with it. FSDP calls it past all dispatch modes."""
    allocation = allocation_of(tensor)
    if allocation is not None and allocation.gpu is not None and allocation.block is not None:
        with allocation.gpu.lock:
            allocation.gpu.memory.record_stream(allocation.block, stream.stream_id)


def _product(function):
    """A product of tensors in half precision whose result is asked for in single."""

    def product(first, second, out_dtype):
        return function(first.to(out_dtype), second.to(out_dtype))

    return product


def _sum_of_product(function):
    def product(added, first, second, out_dtype, beta=1, alpha=1):
        return function(added.to(out_dtype), first.to(out_dtype), second.to(out_dtype), beta=beta, alpha=alpha)

    return product


KERNELS = {
    "record_stream": record_stream,
    **norms.SYNC_BATCH_NORM,
    "mm.dtype": _product(torch.mm),
    "bmm.dtype": _product(torch.bmm),
    "addmm.dtype": _sum_of_product(torch.addmm),
    "baddbmm.dtype": _sum_of_product(torch.baddbmm),
}
