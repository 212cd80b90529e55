"""Modules that move: in a dry run, too, a parameter stays itself."""

import torch
from torch import nn

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace what Module.to, cuda, half and their kind do."""
    patches.stand_in(nn.Module, "_apply", _apply, machine)


def _apply(machine: Machine, original, module: nn.Module, *args, **kwargs):
    """A parameter that came with its numbers (from a file) cannot take a shape for its data, so PyTorch puts another in its place: it
    would no longer be tied to those that it was tied to, whose memory would then count twice, and an optimizer would keep the old one.
    """
    if not machine.dry or machine.local.bypass:
        return original(module, *args, **kwargs)
    given = _parameters(module)
    out = original(module, *args, **kwargs)
    for name, moved in _parameters(module).items():
        parameter = given[name]
        if moved is not parameter and _compat.is_really_meta(moved) and not _compat.is_really_meta(parameter):
            torch.utils.swap_tensors(parameter, moved)
            setattr(module, name, parameter)
    return out


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))
