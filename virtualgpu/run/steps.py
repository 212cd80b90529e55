"""Optimizer steps of a program, on the simulated clock, counted in its processes: `fit` and `--explain` ask for a few and end the program after
them.

Each process notes when its optimizer has stepped, and whether a GPU ran out of memory; at the end it leaves both in the runner's folder. A step
is one of the optimizer that stepped first, so that two optimizers (of a GAN, say) are one step.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from virtualgpu import _compat, environment
from virtualgpu.run import results
from virtualgpu.run.trials import LEFT, Steps
from virtualgpu.torch_api.patches import Patches


class Watch:
    """Notes when each step was done. After `most` of them it raises SystemExit, as if the program had come to its end; 0: it never does. rows:
    looks on at what goes into the model, where somebody asks for it."""

    def __init__(self, machine, most: int, rows: "Rows | None" = None):
        self.machine, self.most, self.rows = machine, most, rows
        self._begin_anew()
        register_optimizer_step_post_hook(self._stepped)
        for gpu in machine.gpus:
            gpu.memory.watch(self._heard)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        """Also in a process that was forked: its parent's steps are not its own."""
        self.count, self.several = 0, False
        self.first: int | None = None
        self.ends: list[float] = []
        self.busy: list[float] = []
        self.asked: int | None = None
        if self.rows is not None:
            self.rows.stepped()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self.first = self.first or id(optimizer)
        if id(optimizer) != self.first:
            self.several = True
            return
        self.count += 1
        self.on_step()
        if self.count == self.most:
            raise SystemExit(0)

    def on_step(self) -> None:
        """A step was made."""
        self.ends.append(self.machine.clock.latest())
        self.busy.append(max(self.machine.clock.busy))
        if self.rows is not None:
            self.rows.stepped()

    def _heard(self, action: str, address: int, size: int, stream: int, block) -> None:
        if action == "oom":
            self.asked = size

    def leave(self, folder: str) -> None:
        """For `trials.collect`."""
        shapes = [] if self.rows is None else list(self.rows.last.items())
        passes = 0 if self.rows is None else self.rows.passes
        passes = min(1, passes) if self.several else passes
        results.leave(folder, LEFT, Steps(environment.rank(), self.ends, self.asked, shapes, passes, self.busy))


# -- How many rows of data a step takes: `fit` tells samples per second, and programs count their batch in many ways (for each rank, for all, for
# each of several micro-batches).
#
# Kept are the shapes of what goes into the module that each step calls first: the model, called once for a micro-batch, and the number of
# backward passes: a program that shows a batch to the model twice (contrastive learning) makes one of both.


class Rows:
    """Looks on at the modules that this process's main thread calls with gradients on.

    last: {shape, its first two sizes: calls} of the last step; passes: backward passes of it.
    """

    def __init__(self):
        self.last: Counter[tuple[int, ...]] = Counter()
        self.passes = 0
        self._now: Counter[tuple[int, ...]] = Counter()
        self._passes = 0
        self._first: int | None = None
        self._depth, self._thread = 0, threading.get_ident()
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        Patches().stand_in(torch.autograd, "backward", self._backward)  # of which PyTorch has no hook for all

    def _backward(self, original, *args, **kwargs):
        self._passes += _compat.graph_task() == -1
        return original(*args, **kwargs)

    def _enter(self, module: nn.Module, _) -> None:
        if threading.get_ident() == self._thread and (self._depth or torch.is_grad_enabled()):
            self._depth += 1

    def _leave(self, module: nn.Module, inputs: tuple, *rest) -> None:
        """rest: keyword arguments, which a call that raised does not have, and the result."""
        if threading.get_ident() != self._thread or not self._depth:
            return
        self._depth -= 1
        if not self._depth and _compat.graph_task() == -1:  # in a backward pass, a checkpoint computes again
            self._note(module, (*inputs, *(rest[0].values() if len(rest) == 2 else ())))

    def _note(self, module: nn.Module, inputs: Iterable) -> None:
        self._first = self._first or id(module)
        if id(module) == self._first and (tensor := _tensor(inputs)) is not None:
            self._now[tuple(tensor.shape[:2])] += 1

    def stepped(self) -> None:
        """The optimizer has: what comes now belongs to the next step."""
        self.last, self.passes = self._now, self._passes
        self._now, self._passes, self._first = Counter(), 0, None


def _tensor(inputs: Iterable) -> Tensor | None:
    """The first, also where tuples or dictionaries hold it."""
    for value in inputs:
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else (value,)
        for inner in held:
            if isinstance(inner, Tensor) and inner.dim():
                return inner
    return None
