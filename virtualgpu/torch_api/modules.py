"""Modules that move or are loaded: in a dry run, too, a parameter stays itself, and has a shape alone."""

import torch
from torch import nn

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace what Module.to, cuda, half and their kind do, and load_state_dict."""
    patches.stand_in(nn.Module, "_apply", _apply, machine)
    patches.stand_in(nn.Module, "load_state_dict", _load_state_dict, machine)


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


def _load_state_dict(machine: Machine, original, module: nn.Module, state_dict, strict=True, assign=False):
    """With `assign`, the parameters are a file's tensors, with their numbers. A dry run has no use for those, and autograd takes no shape for
    the gradient of such a leaf: a model that is cut or cast before it moves to its GPU would fail."""
    result = original(module, state_dict, strict=strict, assign=assign)
    if assign and machine.dry and not machine.local.bypass:
        for parameter in module.parameters():
            if type(parameter) is nn.Parameter and not _compat.is_really_meta(parameter):
                shape = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                torch.utils.swap_tensors(parameter, nn.Parameter(shape, parameter.requires_grad))
    return result


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))
