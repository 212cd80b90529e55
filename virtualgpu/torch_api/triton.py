"""Triton's kernels on virtual GPUs: interpreted, where TRITON_INTERPRET=1 is set before triton is imported (the runner sets it), and
refused in a sentence where they were to be compiled, which needs a driver.

Triton's interpreter copies a GPU's tensors to the host and back. Here the numbers are on the host already: it works on them as they are,
so no copy is counted, and no memory. A kernel takes the time of moving its tensors once; its FLOPs are not known. In a dry run it does
not run, and what is written to its tensors is not known.
"""

import functools
import warnings

import torch

from virtualgpu.engine import values
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.timing.costs import moved
from virtualgpu.timing.kinds import PLAIN
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches

REFUSED = (
    "Triton compiles a kernel for a GPU's driver, and virtual GPUs have none: set TRITON_INTERPRET=1 before triton is imported, and its "
    "kernels are interpreted (python -m virtualgpu sets it, where NumPy is installed)"
)
TOLD = (
    "Triton's kernels are interpreted on virtual GPUs (TRITON_INTERPRET=1): their numbers are right, and come slowly; "
    "their simulated time is that of moving their tensors"
)


def install(machine: Machine, patches: Patches) -> None:
    """Whenever triton comes, if it does."""
    when_imported("triton.runtime.interpreter", lambda module: _interpret(machine, patches, module), patches)
    when_imported("triton.runtime.jit", lambda module: _refuse(machine, patches, module), patches)
    when_imported("triton.runtime.autotuner", lambda module: _choose(patches, module), patches)


def _interpret(machine: Machine, patches: Patches, interpreter) -> None:
    Executor, told = interpreter.GridExecutor, []
    call, to_host, back = Executor.__call__, Executor._init_args_hst, Executor._restore_args_dev

    @functools.wraps(call)
    def run(executor, *args, **kwargs):
        tensors = _tensors((*args, *kwargs.values()))
        gpu = None if machine.local.bypass else _place(machine, args, tensors)
        if gpu is None:
            return call(executor, *args, **kwargs)
        if not told:
            told.append(True)
            warnings.warn(TOLD, stacklevel=2)
        if machine.dry:
            values.invalidate(tensors)
        else:
            with machine.untracked():
                call(executor, *args, **kwargs)
        seconds = gpu.kernels.moving(moved(tensors), PLAIN)
        machine.clock.launch(gpu.index, seconds, getattr(executor.fn, "__name__", "triton"))

    @functools.wraps(to_host)
    def as_they_are(executor, args, kwargs):
        return (list(args), dict(kwargs)) if machine.local.bypass else to_host(executor, args, kwargs)

    @functools.wraps(back)
    def nothing(executor, *args):
        return None if machine.local.bypass else back(executor, *args)

    patches.replace(Executor, "__call__", run)
    patches.replace(Executor, "_init_args_hst", as_they_are)
    patches.replace(Executor, "_restore_args_dev", nothing)


def _refuse(machine: Machine, patches: Patches, jit) -> None:
    original = jit.JITFunction.run

    @functools.wraps(original)
    def run(function, *args, **kwargs):
        if any(gpu_of(tensor) is not None for tensor in _tensors((*args, *kwargs.values()))):
            raise NotImplementedError(REFUSED)
        return original(function, *args, **kwargs)

    patches.replace(jit.JITFunction, "run", run)


def _choose(patches: Patches, autotuner) -> None:
    """Of a kernel's configurations the first: they give the same numbers, and to measure them takes a driver."""
    original = autotuner.Autotuner._bench

    @functools.wraps(original)
    def bench(tuner, *args, config, **meta):
        if any(gpu_of(tensor) is not None for tensor in _tensors((*args, *meta.values()))):
            return [0.0, 0.0, 0.0]
        return original(tuner, *args, config=config, **meta)

    patches.replace(autotuner.Autotuner, "_bench", bench)


def _tensors(arguments) -> list[torch.Tensor]:
    """Those among a kernel's arguments, also where Triton has wrapped them (a descriptor, another type)."""
    found = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += _tensors(value)
        elif isinstance(base := getattr(value, "base", None), torch.Tensor):
            found.append(base)
    return found


def _place(machine: Machine, args, tensors) -> GPU | None:
    """The GPU of a kernel's tensors; None where all are the CPU's. Raises Triton's ValueError for one that the GPU cannot reach."""
    gpu = next((where for tensor in tensors if (where := gpu_of(tensor)) is not None), None)
    if gpu is None:
        return None
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor) and gpu_of(value) is None and not value.is_pinned():
            raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)")
    return machine.own(gpu)
