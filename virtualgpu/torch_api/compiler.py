"""torch.compile on virtual GPUs: it gives what it gives elsewhere (an OptimizedModule, a function), which then runs eagerly."""

import warnings

import torch

from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api import flex
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.compile, whose first call warns, and what `flex` replaces."""
    patches.stand_in(torch, "compile", _compile, patches, [])
    flex.install(machine, patches)


def _compile(patches: Patches, warned: list, original, model=None, **options):
    if not warned:
        warned.append(True)
        warnings.warn("torch.compile: on virtual GPUs it runs eagerly, with eager's memory and time", stacklevel=3)
        before = torch.compiler.set_stance("force_eager")  # imports torch._dynamo, which takes a second or two
        patches.undo(lambda: before.__exit__(None, None, None))
        before.__enter__()
    return original(model, **options)
