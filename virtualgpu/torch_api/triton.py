"""Triton's kernels on virtual GPUs: interpreted, where TRITON_INTERPRET=1 is set before triton is imported (the runner sets it), and
refused in a sentence where they were to be compiled, which needs a driver.

Triton's interpreter copies a GPU's tensors to the host and back. Here the numbers are on the host already: it works on them as they are,
so no copy is counted, and no memory. A kernel takes the time of moving its tensors once; its FLOPs are not known. In a dry run it does
not run, and what is written to its tensors is not known.
"""

import warnings

import torch

from virtualgpu.engine import values
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.timing.flops import moved
from virtualgpu.timing.memory_bound import ORDINARY
from virtualgpu.torch_api.patches import Patches, when_imported

REFUSED = (
    "Triton compiles a kernel for a GPU's driver, and virtual GPUs have none: set TRITON_INTERPRET=1 before triton is imported, and its "
    "kernels are interpreted (python -m virtualgpu sets it, where NumPy is installed)"
)
WARNING = (
    "Triton's kernels are interpreted on virtual GPUs (TRITON_INTERPRET=1): their numbers are right, and come slowly; "
    "their simulated time is that of moving their tensors"
)


def install(machine: Machine, patches: Patches) -> None:
    """Whenever triton comes, if it does."""
    when_imported("triton.runtime.interpreter", lambda module: _interpret(machine, patches, module), patches)
    when_imported("triton.runtime.jit", lambda module: patches.stand_in(module.JITFunction, "run", _refuse), patches)
    when_imported(
        "triton.runtime.autotuner", lambda module: patches.stand_in(module.Autotuner, "_bench", _bench), patches
    )


def _interpret(machine: Machine, patches: Patches, interpreter) -> None:
    executor = interpreter.GridExecutor
    patches.stand_in(executor, "__call__", _run, machine, [])
    patches.stand_in(executor, "_init_args_hst", _as_they_are, machine)
    patches.stand_in(executor, "_restore_args_dev", _nothing, machine)


def _run(machine: Machine, warned: list, original, executor, *args, **kwargs):
    tensors = _tensors((*args, *kwargs.values()))
    gpu = None if machine.local.bypass else _place(machine, args, tensors)
    if gpu is None:
        return original(executor, *args, **kwargs)
    if not warned:
        warned.append(True)
        warnings.warn(WARNING, stacklevel=3)
    if machine.dry:
        values.invalidate(tensors, "a Triton kernel")
    else:
        with machine.untracked():
            original(executor, *args, **kwargs)
    seconds = gpu.kernels.moving(moved(tensors), ORDINARY)
    machine.clock.launch(gpu.index, seconds, getattr(executor.fn, "__name__", "triton"))


def _as_they_are(machine: Machine, original, executor, args, kwargs):
    return (list(args), dict(kwargs)) if machine.local.bypass else original(executor, args, kwargs)


def _nothing(machine: Machine, original, executor, *args):
    return None if machine.local.bypass else original(executor, *args)


def _refuse(original, function, *args, **kwargs):
    if _on_gpu((*args, *kwargs.values())):
        raise NotImplementedError(REFUSED)
    return original(function, *args, **kwargs)


def _bench(original, tuner, *args, config, **meta):
    """Of a kernel's configurations the first: they give the same numbers, and to measure them takes a driver."""
    if _on_gpu((*args, *meta.values())):
        return [0.0, 0.0, 0.0]
    return original(tuner, *args, config=config, **meta)


def _on_gpu(arguments) -> bool:
    return any(gpu_of(tensor) is not None for tensor in _tensors(arguments))


def _tensors(arguments) -> list[torch.Tensor]:
    """Those among a kernel's arguments, also where Triton has wrapped them (a descriptor, another type)."""
    tensors = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors += _tensors(value)
        elif isinstance(base := getattr(value, "base", None), torch.Tensor):
            tensors.append(base)
    return tensors


def _place(machine: Machine, args, tensors) -> GPU | None:
    """The GPU of a kernel's tensors; None where all are the CPU's. Raises Triton's ValueError for one that the GPU cannot reach."""
    gpu = next((gpu for tensor in tensors if (gpu := gpu_of(tensor)) is not None), None)
    if gpu is None:
        return None
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and gpu_of(value) is None and not value.is_pinned():
            raise ValueError(f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?)")
    return machine.own(gpu)
