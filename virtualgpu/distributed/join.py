"""`Join`, for ranks with unequal numbers of batches, in a dry run.

It counts the ranks that are still at work by adding up ones of float32. A dry run knows the values of whole numbers alone: with
others no rank would ever learn that all have ended.
"""

import torch
from torch.distributed.algorithms.join import Join
from torch.overrides import TorchFunctionMode

from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Let Join count in int32, which has as many bytes."""
    for name in ("_get_num_nonjoined_procs", "notify_join_context", "_notify_procs_to_terminate"):
        patches.stand_in(Join, name, _counting, machine)


class _WholeNumbers(TorchFunctionMode):
    """torch.ones and torch.zeros are int32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        whole = {"dtype": torch.int32} if func in (torch.ones, torch.zeros) else {}
        return func(*args, **(kwargs or {}), **whole)


def _counting(machine: Machine, original, *args):
    if not machine.dry:
        return original(*args)
    with _WholeNumbers():
        return original(*args)
