"""What lies on each GPU when its memory stands highest, or when it has run out: `python -m virtualgpu --report`.

A listener on each allocator keeps the blocks that live, and what has changed since the peak; the blocks at the peak follow from
both. A block made in a forward pass is an activation, in a backward pass a gradient, in an optimizer's step its state; what turns
out to belong to a module is a parameter, and what is a parameter's `.grad` a gradient. What cuBLAS works in is a kind of its own.
"""

import gc
import itertools
import re
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import ALLOCATION, storage_of
from virtualgpu.run.report import Frame, LiveBlock, Peak, kinds_and_verdict, own_frames

DEPTH = 40  # frames looked through for the reader's line


class Peaks:
    """The peaks of a machine's GPUs. `close` stops the watching."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.watched = [_Watched(gpu) for gpu in machine.gpus]
        hooks = (register_module_forward_pre_hook, register_optimizer_step_pre_hook)
        self.hooks = [register(lambda owner, *_: self._mark(owner)) for register in hooks]

    def peaks(self) -> list[Peak]:
        """One for each GPU that was used."""
        return [watched.peak_of() for watched in self.watched if watched.peak_bytes]

    def close(self) -> None:
        """The hooks of modules and optimizers are removed; what was seen so far stays readable."""
        for hook in self.hooks:
            hook.remove()
        for watched in self.watched:
            watched.gpu.memory.watch(watched.hear, on=False)

    def _mark(self, owner: torch.nn.Module | torch.optim.Optimizer) -> None:
        for kind, tensor in owned_by(owner):
            gpu, block = place_of(tensor)
            if block is not None and gpu.machine is self.machine and block.address in self.watched[gpu.index].live:
                self.watched[gpu.index].live[block.address][1] = kind


def owned_by(owner: torch.nn.Module | torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """What a module or an optimizer knows of parameters, gradients and state, each with its kind; nothing of one whose __init__ has not
    begun."""
    attributes, state = vars(owner), []
    if isinstance(owner, torch.optim.Optimizer):
        tensors = [tensor for group in attributes.get("param_groups", ()) for tensor in group["params"]]
        state = [
            value
            for values in attributes.get("state", {}).values()
            if isinstance(values, dict)
            for value in values.values()
        ]
    else:
        tensors = [*attributes.get("_parameters", {}).values(), *attributes.get("_buffers", {}).values()]
    yield from (("optimizer", value) for value in state if isinstance(value, torch.Tensor))
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            yield "parameters", tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield "gradients", tensor.grad


def place_of(tensor: torch.Tensor) -> tuple:
    """The engine's GPU that it lies on, and its block there; None and None where it lies on none."""
    allocation = getattr(storage_of(tensor), ALLOCATION, None)
    return (None, None) if allocation is None else (allocation.gpu, allocation.block)


class _Watched:
    """One GPU. `live`: {address: [bytes, kind, frame]}; `born` and `freed` since the peak."""

    def __init__(self, gpu: GPU):
        self.gpu = gpu
        self.live: dict[int, list] = {}
        self.born: set[int] = set()
        self.freed: list[list] = []
        self.bytes = self.peak_bytes = self.peak_reserved = 0
        self.died: tuple[int, list[list]] | None = (
            None  # at the last out of memory: what was asked for, and what was there
        )
        gpu.memory.watch(self.hear)

    def hear(self, action: str, address: int, size: int, stream: int, block) -> None:
        if action == "alloc":
            size = block.size if block is not None else size
            self.live[address] = [size, self._kind(), _frame()]
            self.bytes += size
            self.born.add(address)
            if self.bytes > self.peak_bytes:
                self.peak_bytes, self.peak_reserved = self.bytes, self.gpu.memory.reserved
                self.born.clear()
                self.freed.clear()
                self.died = None
        elif action == "free_completed" and (entry := self.live.pop(address, None)) is not None:
            self.bytes -= entry[0]
            if address in self.born:
                self.born.remove(address)
            else:
                self.freed.append(entry)
        elif action == "oom":
            self.died = size, list(self.live.values())

    def _kind(self) -> str:
        if self.gpu.makes_workspace:
            return "cuBLAS workspaces"
        local = self.gpu.machine.clock.local
        if local.backward is not None:
            return "gradients"
        if local.kind == "optimizer":
            return "optimizer"
        return "activations" if torch.is_grad_enabled() else "other"

    def peak_of(self) -> Peak:
        """What lay on it at its peak, or when it ran out of memory."""
        if self.died is not None:
            asked, entries = self.died
            return Peak.of(self.gpu, itertools.starmap(LiveBlock, entries), asked)
        entries = [entry for address, entry in self.live.items() if address not in self.born] + self.freed
        return Peak.of(self.gpu, itertools.starmap(LiveBlock, entries), reserved=self.peak_reserved)


def _frame() -> Frame | None:
    """The reader's line, where there is one near."""
    frame: FrameType | None = sys._getframe(2)
    frames: list[Frame] = []
    while frame is not None and len(frames) < DEPTH:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return next(iter(own_frames(frames)), None)


# -- An uncaught OutOfMemoryError under the runner ends with what lay on that GPU, by kind, and how much would have had to go.
#
# Nothing is watched before: at the error the program's frames still hold its tensors, and modules and optimizers say what is theirs.


UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
REST = "activations"  # and whatever else neither module nor optimizer knows


def explain_uncaught(machine: Machine) -> None:
    """From now on, behind the traceback that Python prints."""
    before = sys.excepthook

    def hook(kind, error, trace) -> None:
        before(kind, error, trace)
        size = re.search(r"Tried to allocate ([\d.]+) (\w+)\. GPU (\d+) ", str(error))
        if issubclass(kind, torch.OutOfMemoryError) and size and size[2] in UNITS and sys.stderr is not None:
            gpu, asked = machine.gpus[int(size[3])], _in_bytes(*size.groups()[:2])
            held = re.search(r"([\d.]+) (\w+) is allocated by PyTorch", str(error))
            lines = kinds_and_verdict(peak(gpu, asked, _in_bytes(*held.groups()) if held else 0))
            print(*lines, "  by the line that made them: python -m virtualgpu --report", sep="\n", file=sys.stderr)

    sys.excepthook = hook


def _in_bytes(number: str, unit: str) -> int:
    return int(float(number) * UNITS[unit])


def peak(gpu: GPU, asked: int, held: int) -> Peak:
    """What lay on it: a block a kind. asked: bytes that could not be had. held: as the error says, to a hundredth of a GiB; what the
    frames that have ended kept is free by now (a list that was being made)."""
    seen, sizes = set(), dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    owners = [owner for owner in gc.get_objects() if issubclass(type(owner), (torch.nn.Module, torch.optim.Optimizer))]
    for kind, tensor in itertools.chain.from_iterable(map(owned_by, owners)):
        its_gpu, block = place_of(tensor)
        if its_gpu is gpu and block is not None and block.address not in seen:
            seen.add(block.address)
            sizes[kind] += block.size
    allocated = gpu.settled().allocated
    sizes[REST] = (held if held > 1.01 * allocated else allocated) - sum(sizes.values())
    return Peak.of(gpu, (LiveBlock(size, kind) for kind, size in sizes.items() if size > 0), asked)
