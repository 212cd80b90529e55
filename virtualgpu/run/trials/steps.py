"""Optimizer steps of a program, on the simulated clock: `python -m virtualgpu fit` asks for a few and ends the program after them.

Each process notes when its optimizer has stepped, and whether a GPU ran out of memory; at the end it leaves both in the runner's folder.
A step is one of the optimizer that stepped first, so that two optimizers (of a GAN, say) are one step.
"""

import itertools
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from virtualgpu.run import left
from virtualgpu.run.table import size

if TYPE_CHECKING:
    from virtualgpu.run.trials.rows import Rows

LEFT = "steps"


class Steps(NamedTuple):
    """One process's. ends: simulated seconds at which each step was queued and done. busy: seconds for which the busiest GPU had worked by
    then. asked: bytes that could not be had, or None. rows: shapes that went into the model in the last step, each with its calls; passes:
    backward passes of it, of which several optimizers make one (run/trials/rows.py)."""

    rank: int
    ends: list[float]
    asked: int | None
    rows: Sequence[tuple[Sequence[int], int]]
    passes: int
    busy: Sequence[float] = ()

    @property
    def seconds(self) -> float | None:
        """Of a step: the median, without the first one, which has the allocator's and the optimizer's beginnings."""
        lasted = _between(self.ends)
        return statistics.median(lasted) if lasted else None

    @property
    def working(self) -> float | None:
        """The share of such a step in which the busiest GPU works."""
        worked = _between(self.busy)
        return statistics.median(worked) / self.seconds if worked and self.seconds else None


def _between(moments: Sequence[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(moments)]


class Counter:
    """Counts this process's steps: those of the optimizer that stepped first. After `most` of them it raises SystemExit, as if the program
    had come to its end; 0: it never does."""

    def __init__(self, most: int):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.most, self.count, self.several = most, 0, False
        self.first: int | None = None
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer, *_) -> None:
        self.first = self.first or id(optimizer)
        if id(optimizer) != self.first:
            self.several = True
            return
        self.count += 1
        self.made()
        if self.count == self.most:
            raise SystemExit(0)

    def made(self) -> None:
        """After each of them."""
        raise NotImplementedError


class Watch(Counter):
    """Notes when each step was done, on the simulated clock. rows: looks on at what goes into the model, where somebody asks for it."""

    def __init__(self, machine, most: int, rows: "Rows | None" = None):
        super().__init__(most)
        self.machine, self.rows = machine, rows
        self.ends: list[float] = []
        self.busy: list[float] = []
        self.asked: int | None = None
        for gpu in machine.gpus:
            gpu.memory.watch(self._heard)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def made(self) -> None:
        """A step was made."""
        self.ends.append(self.machine.clock.latest())
        self.busy.append(max(self.machine.clock.busy))
        if self.rows is not None:
            self.rows.stepped()

    def _heard(self, action: str, address: int, size: int, stream: int, block) -> None:
        if action == "oom":
            self.asked = size

    def _begin_anew(self) -> None:
        """In a process that was forked: its parent's steps are not its own."""
        self.count, self.first, self.several, self.ends, self.busy, self.asked = 0, None, False, [], [], None
        if self.rows is not None:
            self.rows.stepped()

    def leave(self, folder: str) -> None:
        """For `collect`."""
        from virtualgpu import environment

        shapes = [] if self.rows is None else list(self.rows.last.items())
        passes = 0 if self.rows is None else self.rows.passes
        passes = min(1, passes) if self.several else passes
        steps = Steps(environment.rank(), self.ends, self.asked, shapes, passes, self.busy)
        left.leave(folder, LEFT, steps)


def lacking(processes: Iterable[Steps], output: str) -> str:
    """What could not be had, where memory is what ended a program that left these and printed that; "" otherwise."""
    asked = [process.asked for process in processes if process.asked is not None]
    return f"{size(max(asked))} more were asked for" if asked and "OutOfMemoryError" in output else ""


def collect(folder: str) -> list[Steps]:
    """What the processes left, by rank."""
    processes = [Steps(*record) for _, record in left.collect(folder, LEFT) if record is not None]
    return sorted(processes, key=lambda process: process.rank)
