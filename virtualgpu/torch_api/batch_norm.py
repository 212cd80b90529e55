"""torch.nn.SyncBatchNorm in a dry run. It leaves out ranks that have no rows, by a mask whose values a dry run does not have.

While a CUDA graph is captured, shapes may not depend on values either, and PyTorch takes the statistics of all ranks: here, too.
"""

import functools
import threading

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace its forward, and torch.cuda.is_current_stream_capturing, which that asks."""
    original, asked = _compat.SyncBatchNormFunction.forward, torch.cuda.is_current_stream_capturing
    inside = threading.local()

    @functools.wraps(original)
    def forward(*args):
        inside.dry = machine.dry
        try:
            return original(*args)
        finally:
            inside.dry = False

    @functools.wraps(asked)
    def is_current_stream_capturing() -> bool:
        return getattr(inside, "dry", False) or asked()

    patches.replace(_compat.SyncBatchNormFunction, "forward", staticmethod(forward))
    patches.replace(torch.cuda, "is_current_stream_capturing", is_current_stream_capturing)
