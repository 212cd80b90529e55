"""How many rows of data an optimizer's step takes: `fit` tells samples per second, and programs count their batch in many ways (for each rank,
for all, for each of several micro-batches).

Kept are the shapes of what goes into the module that each step calls first: the model, called once for a micro-batch, and the number of
backward passes: a program that shows a batch to the model twice (contrastive learning) makes one of both."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from virtualgpu import _compat
from virtualgpu.torch_api.patches import Patches


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
