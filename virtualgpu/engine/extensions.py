"""Operations that others wrote in Python, by torch.library: which of their kernels runs here, and whether what it calls comes by.

A kernel for every device (`custom_op`, `default`, CompositeExplicitAutograd) sees tensors on GPUs, and each operation of it comes by;
so does one for CUDA, where it is the only one. A kernel for the CPU may hand addresses to C or arrays to NumPy: it sees the tensors as
what they are, the CPU's, and is one kernel of the GPU.
"""

from virtualgpu import _compat
from virtualgpu.engine.storage import gpu_of, tensors_of

EVERY, CPU, CUDA = "CompositeExplicitAutograd", "CPU", "CUDA"


def run(dispatch, func, args, kwargs):
    """What an operation's kernel in Python makes; NotImplemented where it has none that sees the GPUs."""
    on_gpu = any(gpu_of(tensor) is not None for tensor in tensors_of(args, kwargs))
    by_key = _kernels(func)
    if EVERY in by_key:
        kernel = by_key[EVERY]
    elif CPU in by_key:
        dry = dispatch.machine.dry
        kernel = None if (dry and _has_meta(func)) or (on_gpu and not dry) else by_key[CPU]
    else:
        kernel = by_key.get(CUDA) if on_gpu else None
    if kernel is None:
        return NotImplemented
    with dispatch:  # what it calls comes by
        return kernel(*args, **kwargs)


def on_gpu(func):
    """The operation, for a GPU's tensors: a kernel for the CPU finds the CPU's."""

    def carry_out(*args, **kwargs):
        gpu = next((gpu for tensor in tensors_of(args, kwargs) if (gpu := gpu_of(tensor)) is not None), None)
        if gpu is None:
            return func(*args, **kwargs)
        with gpu.machine.untracked():
            return func(*args, **kwargs)

    return carry_out


def _kernels(func) -> dict:
    """{dispatch key: function} of the kernels that Python registered. Asked anew at every call: a notebook's next cell may add one."""
    custom = _compat.custom_kernels(func)
    if custom is not None:
        keys = {None: EVERY, "cpu": CPU, "cuda": CUDA}
        return {keys[device]: kernel for device, kernel in custom.items() if device in keys}
    name = func.name().partition("::")[2]
    registered = _compat.registered_in_python()
    return {
        key: _compat.kernel(func, key) for key in (EVERY, CPU, CUDA) if f"{func.namespace}/{name}/{key}" in registered
    }


def _has_meta(func) -> bool:
    return _compat.has_kernel(func.name(), "Meta")
