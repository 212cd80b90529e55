"""Optimizer steps of a tried program on the simulated clock, what it printed, and how far the trials are."""

import contextlib
import itertools
import os
import re
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from virtualgpu.environment import DRY_HAS_NO_VALUES
from virtualgpu.run import cli, results
from virtualgpu.run.report import size

# -- Optimizer steps of a program, on the simulated clock: `python -m virtualgpu fit` asks for a few and ends the program after them.
#
# Each process notes when its optimizer has stepped, and whether a GPU ran out of memory; at the end it leaves both in the runner's folder.
# A step is one of the optimizer that stepped first, so that two optimizers (of a GAN, say) are one step.

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


class StepCounter:
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
        self.on_step()
        if self.count == self.most:
            raise SystemExit(0)

    def on_step(self) -> None:
        """After each of them."""
        raise NotImplementedError


class Watch(StepCounter):
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

    def on_step(self) -> None:
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
        results.leave(folder, LEFT, steps)


def lacking(processes: Iterable[Steps], output: str) -> str:
    """What could not be had, where memory is what ended a program that left these and printed that; "" otherwise."""
    asked = [process.asked for process in processes if process.asked is not None]
    return f"{size(max(asked))} more were asked for" if asked and "OutOfMemoryError" in output else ""


def collect(folder: str) -> list[Steps]:
    """What the processes left, by rank."""
    processes = [Steps(*record) for _, record in results.collect(folder, LEFT) if record is not None]
    return sorted(processes, key=lambda process: process.rank)


# -- What a trial's program printed: the error that ended it, the lines that read a value, what the engine warned of.


READS = re.compile(rf"^(.+):(\d+): UserWarning: {DRY_HAS_NO_VALUES}", re.M)
WARNING = re.compile(r"UserWarning: (.*\bvirtual GPUs?\b.*)$", re.M)
ERROR = re.compile(r"([\w.]*(?:Error|Exception|Interrupt)\w*|[^\s:]+: error)(:.*)?$")  # or argparse's
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
RANK = re.compile(r"^\[[\w:]*rank\d+\]:\s?")
# Whoever waited for what had failed: torchrun for its processes, a rank for another one
CONSEQUENCES = re.compile(
    r"ChildFailedError|ProcessExitedException|ProcessRaisedException|DistBackendError|RendezvousConnectionError"
)
PACKAGE = os.path.dirname(cli.HERE)


def reads(output: str) -> str:
    """The first line of the program that reads a value of the GPU, "train.py:12"; or nothing."""
    line = READS.search(output)
    return f"{os.path.basename(line[1])}:{line[2]}" if line else ""


def not_known(places: Sequence[str]) -> str:
    """A sentence on lines that read a value of the GPU."""
    decided = "so what the program decides by it may be otherwise"
    return f"{', '.join(places)} read{'s' * (len(places) == 1)} a value of the GPU: a dry run has nan there, {decided}."


def warnings(output: str) -> list[str]:
    """What the engine does otherwise than a GPU, as it said so, each once."""
    return list(dict.fromkeys(words.strip() for words in WARNING.findall(output)))


def end(status: int, output: str) -> str:
    """What a program that failed came to."""
    if -status in {number.value for number in signal.Signals}:
        killed = -status == getattr(signal, "SIGKILL", 9)
        cure = " (this machine's memory may have been too small: --jobs 1)" if killed else ""
        return f"ended by {signal.Signals(-status).name}{cure}"
    return error(output) or f"ended with status {status}"


def error(output: str) -> str:
    """What ended the program, with the program's line: the last error that is not another process's word on it; or its last line."""
    errors: list[tuple[str, str]] = []
    places: dict[str, str] = {}  # the one that each rank's traceback named last
    for line in output.splitlines():
        head = RANK.match(line)
        rank, line = (head[0], line[head.end() :]) if head else ("", line)
        if where := PLACE.search(line):
            if _is_the_programs(where[1]):
                places[rank] = f" ({os.path.basename(where[1])}:{where[2]})"
        elif line.startswith("Traceback"):
            places[rank] = ""
        elif kind := ERROR.match(line.strip()):
            errors.append((kind[1], line.strip()[:300] + places.get(rank, "")))
    causes = [words for kind, words in errors if not CONSEQUENCES.search(kind)] or [words for _, words in errors]
    return causes[-1] if causes else last_line(output)


def last_line(output: str) -> str:
    """What it printed last, if anything."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _is_the_programs(path: str) -> bool:
    """Of the program, not of Python, a package or a command such as torchrun."""
    others = (PACKAGE + os.sep, sys.base_prefix + os.sep, sys.prefix + os.sep, "<")
    return "site-packages" not in path and not path.startswith(others) and os.path.basename(path) != "torchrun"


# -- While `fit` and `--explain` run: how far they are. A line on a terminal, or in a notebook's cell; gone at the end.


@contextlib.contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """What to call with the words that stand there now. Nothing is shown where TQDM_DISABLE is set, or nobody looks on."""
    if os.environ.get("TQDM_DISABLE"):
        yield lambda words: None
    elif sys.stderr is not None and sys.stderr.isatty():

        def show(words: str) -> None:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

        try:
            yield show
        finally:
            show("")
    elif (shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) and hasattr(shell, "kernel"):
        from IPython.display import display

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        try:
            yield lambda words: shown.update({"text/plain": words}, raw=True)
        finally:
            shown.update({"text/plain": ""}, raw=True)
    else:
        yield lambda words: None
