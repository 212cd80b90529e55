"""torch.nn.SyncBatchNorm in a dry run. It leaves out ranks that have no rows, by a mask whose values a dry run does not have.

While a CUDA graph is captured, shapes may not depend on values either, and PyTorch takes the statistics of all ranks: here, too.
"""

import threading

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """Replace its forward, and torch.cuda.is_current_stream_capturing, which that asks."""
    inside = threading.local()
    function = _compat.SyncBatchNormFunction
    patches.replace(function, "forward", staticmethod(standing_in(function.forward, _forward, machine, inside)))
    patches.stand_in(torch.cuda, "is_current_stream_capturing", lambda asked: getattr(inside, "dry", False) or asked())


def _forward(machine: Machine, inside: threading.local, original, *args):
    inside.dry = machine.dry
    try:
        return original(*args)
    finally:
        inside.dry = False
