"""FullyShardedDataParallel (FSDP1), once a program has imported it, in a dry run: what has values goes to its GPU as well.

Such as BatchNorm's count of batches. FSDP1 moves a module's states by `state.data = state.to(device)`, which PyTorch refuses between a
tensor with values and one without, so those are swapped.
"""

import functools

import torch
from torch import nn

from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import is_really_meta
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """What is to be done when a program imports it."""
    when_imported(_compat.FSDP1, functools.partial(_install, machine, patches), patches)


def _install(machine: Machine, patches: Patches, module) -> None:
    patches.stand_in(module, _compat.MOVES_STATES, _move_states, machine)


def _move_states(machine: Machine, original, params, buffers, device) -> None:
    if machine.dry and device is not None:
        for state in (*params, *buffers):
            _swap(state, device)
    original(params, buffers, device)


def _swap(state: torch.Tensor, device: torch.device) -> None:
    with torch.no_grad():
        there = state.to(device)
        if is_really_meta(there) and not is_really_meta(state):
            there = nn.Parameter(there, state.requires_grad) if isinstance(state, nn.Parameter) else there
            torch.utils.swap_tensors(state, there)
