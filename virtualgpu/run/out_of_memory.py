"""An uncaught OutOfMemoryError under the runner ends with what lay on that GPU, by kind, and how much would have had to go.

Nothing is watched before: at the error the program's frames still hold its tensors, and modules and optimizers say what is theirs.
"""

import gc
import re
import sys
from collections.abc import Iterator

import torch

from virtualgpu.engine.allocation import ALLOCATION, storage_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.run import report

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
REST = "activations"  # and whatever else neither module nor optimizer knows


def explain_uncaught(machine: Machine) -> None:
    """From now on, behind the traceback that Python prints."""
    before = sys.excepthook

    def hook(kind, error, trace) -> None:
        before(kind, error, trace)
        found = re.search(r"Tried to allocate ([\d.]+) (\w+)\. GPU (\d+) ", str(error))
        if issubclass(kind, torch.OutOfMemoryError) and found and found[2] in UNITS and sys.stderr is not None:
            gpu = machine.gpus[int(found[3])]
            lines = report.kinds_and_verdict(peak(gpu, int(float(found[1]) * UNITS[found[2]])))
            print(*lines, "  by the line that made them: python -m virtualgpu --report", sep="\n", file=sys.stderr)

    sys.excepthook = hook


def peak(gpu: GPU, asked: int) -> report.Peak:
    """What lies on it now: a block a kind. asked: bytes that could not be had."""
    memory, seen, held = gpu.settled(), set(), dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for kind, tensor in _owned():
        allocation = getattr(storage_of(tensor), ALLOCATION, None)
        if (
            allocation is not None
            and allocation.gpu is gpu
            and allocation.block is not None
            and allocation.block.address not in seen
        ):
            seen.add(allocation.block.address)
            held[kind] += allocation.block.size
    held[REST] = memory.allocated - sum(held.values())
    return report.Peak(
        gpu=gpu.physical,
        card=gpu.spec.name,
        capacity=memory.capacity,
        reserved=memory.reserved,
        other=memory.context + memory.others_held,
        blocks=tuple(report.LiveBlock(size, kind) for kind, size in held.items() if size > 0),
        asked=asked,
    )


def _owned() -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of modules and optimizers, with their kind; some come more than once."""
    for owner in gc.get_objects():
        kind = type(owner)
        if issubclass(kind, torch.nn.Module):
            for tensor in (*vars(owner).get("_parameters", {}).values(), *vars(owner).get("_buffers", {}).values()):
                if isinstance(tensor, torch.Tensor):
                    yield "parameters", tensor
                    if tensor.is_leaf and tensor.grad is not None:
                        yield "gradients", tensor.grad
        elif issubclass(kind, torch.optim.Optimizer):
            for state in vars(owner).get("state", {}).values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield "optimizer", value
