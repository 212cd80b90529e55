"""FullyShardedDataParallel (FSDP1) in a dry run: what has values, such as BatchNorm's count of batches, goes to its GPU as well.

FSDP1 moves a module's states by `state.data = state.to(device)`, which PyTorch refuses between a tensor with values and one without.
So those are swapped.
"""

import functools

import torch
from torch import nn

from virtualgpu import _compat as names
from virtualgpu._compat import distributed as _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace what moves them, once torch.distributed.fsdp is imported."""

    def then(module) -> None:
        original = getattr(module, _compat.MOVES_STATES)

        @functools.wraps(original)
        def move(params, buffers, device):
            if machine.dry and device is not None:
                for state in (*params, *buffers):
                    _swap(state, device)
            original(params, buffers, device)

        patches.replace(module, _compat.MOVES_STATES, move)

    when_imported(_compat.FSDP1, then, patches)


def _swap(state: torch.Tensor, device: torch.device) -> None:
    with torch.no_grad():
        there = state.to(device)
        if names.is_really_meta(there) and not names.is_really_meta(state):
            there = nn.Parameter(there, state.requires_grad) if isinstance(state, nn.Parameter) else there
            torch.utils.swap_tensors(state, there)
