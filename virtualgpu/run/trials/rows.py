"""How many rows of data an optimizer's step takes: `fit` tells samples per second, and programs count their batch in many ways (for each rank,
for all, for each of several micro-batches).

Kept are the shapes of what goes into the module that each step calls first: the model, called once for a micro-batch, and the number of
backward passes: a program that shows a batch to the model twice (contrastive learning) makes one of both.
"""

import functools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from virtualgpu import _compat


class Rows:
    """Looks on at the modules that this process's main thread calls with gradients on.

    last: {shape, its first two sizes: calls} of the last step; passes: backward passes of it.
    """

    def __init__(self):
        self.last: Counter[tuple[int, ...]] = Counter()
        self.passes = 0
        self._now: Counter[tuple[int, ...]] = Counter()
        self._passes = 0
        self._first, self._inside, self._thread = None, False, threading.get_ident()
        called = nn.Module.__call__

        @functools.wraps(called)
        def call(module, *args, **kwargs):
            if self._inside or not torch.is_grad_enabled() or threading.get_ident() != self._thread:
                return called(module, *args, **kwargs)
            if _compat.graph_task() == -1:  # in a backward pass, a checkpoint computes again
                self._note(module, (*args, *kwargs.values()))
            self._inside = True
            try:
                return called(module, *args, **kwargs)
            finally:
                self._inside = False

        backward = torch.autograd.backward

        @functools.wraps(backward)
        def counted(*args, **kwargs):
            self._passes += _compat.graph_task() == -1
            return backward(*args, **kwargs)

        nn.Module.__call__, torch.autograd.backward = call, counted

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
        if isinstance(value, Tensor):
            if value.dim():
                return value
        elif isinstance(value, (tuple, list, Mapping)):
            held = value.values() if isinstance(value, Mapping) else value
            for inner in held:
                if isinstance(inner, Tensor) and inner.dim():
                    return inner
    return None
