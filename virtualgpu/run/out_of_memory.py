"""An uncaught OutOfMemoryError under the runner ends with what lay on that GPU, by kind, and how much would have had to go.

Nothing is watched before: at the error the program's frames still hold its tensors, and modules and optimizers say what is theirs.
"""

import gc
import itertools
import re
import sys

import torch

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.run import report
from virtualgpu.run.peaks import owned_by, place_of

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
REST = "activations"  # and whatever else neither module nor optimizer knows


def explain_uncaught(machine: Machine) -> None:
    """From now on, behind the traceback that Python prints."""
    before = sys.excepthook

    def hook(kind, error, trace) -> None:
        before(kind, error, trace)
        size = re.search(r"Tried to allocate ([\d.]+) (\w+)\. GPU (\d+) ", str(error))
        if issubclass(kind, torch.OutOfMemoryError) and size and size[2] in UNITS and sys.stderr is not None:
            gpu = machine.gpus[int(size[3])]
            lines = report.kinds_and_verdict(peak(gpu, int(float(size[1]) * UNITS[size[2]])))
            print(*lines, "  by the line that made them: python -m virtualgpu --report", sep="\n", file=sys.stderr)

    sys.excepthook = hook


def peak(gpu: GPU, asked: int) -> report.Peak:
    """What lies on it now: a block a kind. asked: bytes that could not be had."""
    seen, sizes = set(), dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    owners = [owner for owner in gc.get_objects() if issubclass(type(owner), (torch.nn.Module, torch.optim.Optimizer))]
    for kind, tensor in itertools.chain.from_iterable(map(owned_by, owners)):
        own, block = place_of(tensor)
        if own is gpu and block is not None and block.address not in seen:
            seen.add(block.address)
            sizes[kind] += block.size
    sizes[REST] = gpu.settled().allocated - sum(sizes.values())
    return report.Peak.of(gpu, (report.LiveBlock(size, kind) for kind, size in sizes.items() if size > 0), asked)
