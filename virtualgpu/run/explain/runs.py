"""In each process of `--explain`: what its GPUs did in each step, left for the runner; with a change (`changes`) where it asks for one."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.run import cli, results
from virtualgpu.run.explain.changes import Change, Explained, Parts, candidates, collect, mean
from virtualgpu.run.trials import steps
from virtualgpu.run.trials.programs import Programs, side_by_side

# -- `python -m virtualgpu --explain`: where a step of a program goes, and which changes would gain most.
#
# The unchanged program runs dry for a few steps of its optimizer; each rank tells where its steady steps went (parts). Then it
# runs again for each change that could gain (candidates), with that change simulated, and what its step takes then is the answer.


STEPS = 5
TAKEN = "address already in use"  # what a program says whose port is its own, where another run of it has it: it runs again, alone
NOT_ENDED = "it had not ended in time: does it step an optimizer?"


class Row(NamedTuple):
    """One GPU of one rank (-1: no ranks): its mean step."""

    rank: int
    gpu: int
    parts: Parts


class Tried(NamedTuple):
    """A change and what the step took with it, in seconds; None, and why, where the program did not run to its last step."""

    change: Change
    step: float | None
    words: str = ""


class Explanation(NamedTuple):
    """step: seconds, of the slowest rank. failed: why there is none, in a sentence; "" where there is. tried: the best first. reads: the
    program's line that decides by a value which a dry run does not have. has_loader: was a DataLoader measured?"""

    step: float = 0.0
    rows: tuple[Row, ...] = ()
    tried: tuple[Tried, ...] = ()
    failed: str = ""
    reads: str = ""
    has_loader: bool = False

    def gain(self, tried: Tried) -> float:
        """Of a change: seconds a step."""
        return 0.0 if tried.step is None else self.step - tried.step


class Run(NamedTuple):
    """What a program came to in one run. failed: "" where it made its steps."""

    explained: list[Explained]
    failed: str
    reads: str = ""


def run(
    command: Sequence[str],
    settings: environment.Settings,
    most: int = STEPS,
    jobs: int | None = None,
    limit: float | None = None,
    show: Callable[[str], None] = lambda words: None,
) -> Explanation:
    """What the step of this program consists of on these GPUs, and what it would be with changes.

    command: what would follow `python -m virtualgpu`. most: optimizer steps that it makes, of which the first two are left out; 0: it runs
    to its end. jobs: programs at a time. limit: seconds after which one that has not ended has failed. show: called with words on how far
    it is. An interrupt ends all programs.
    """
    settings = settings._replace(dry=True, steps=most, explain={})
    with Programs() as programs:
        show("the program as it is")
        begin = time.monotonic()
        base = once(programs, settings, command, limit=limit)
        patience = 60 + 20 * (time.monotonic() - begin)  # a change may make it wait for ever
        patience = min(patience, limit or patience)
        if base.failed:
            return Explanation(failed=base.failed, reads=base.reads)
        changes = candidates(base.explained, settings, os.environ)
        ended = itertools.count(1)

        def again(change: Change) -> Tried:
            result = once(programs, change.of(settings), command, change.without, patience)
            show(f"{min(next(ended), len(changes))} of {len(changes)} changes tried: {change.name}")
            return Tried(change, None if result.failed else slowest(result.explained), result.failed)

        show(f"0 of {len(changes)} changes tried")
        tried = programs.side_by_side(again, changes, jobs or side_by_side(command, [len(settings.cards)]))
        tried = [again(one.change) if TAKEN in one.words.lower() else one for one in tried]
    tried.sort(key=lambda one: one.step if one.step is not None else float("inf"))
    rows = tuple(
        Row(one.rank, int(gpu), mean(steps_of_one))
        for one in base.explained
        for gpu, steps_of_one in sorted(one.gpus.items(), key=lambda item: int(item[0]))
    )
    has_loader = any(one.batch is not None for one in base.explained)
    return Explanation(slowest(base.explained), rows, tuple(tried), "", base.reads, has_loader)


def slowest(explained: Sequence[Explained]) -> float:
    """Seconds of a step: of the rank that takes longest in it, on average over the steps."""
    ranks = [next(iter(one.gpus.values())) for one in explained]
    taken = [max(parts.step for parts in step) for step in zip(*ranks, strict=False)]
    return sum(taken) / len(taken)


def once(
    programs,
    settings: environment.Settings,
    command: Sequence[str],
    without: Sequence[str] = (),
    limit: float | None = None,
) -> Run:
    """The program with these settings, in an environment without these variables."""
    with cli.folder() as path:
        environ = {name: value for name, value in os.environ.items() if name not in without}
        environ = cli.environment_of(settings._replace(folder=path), environ)
        status, output = programs.output_of(command, environ, path, limit)
        stepped, explained = steps.collect(path), collect(path)
        failed = _failed(status, output, stepped, explained)
        if failed:
            failed = results.lost(path, status, output) or failed
    return Run(explained, failed, steps.reads(output))


def _failed(status: int | None, output: str, stepped: Sequence[steps.Steps], explained: Sequence[Explained]) -> str:
    if status is None:
        return NOT_ENDED
    if status:
        if lacking := steps.lacking(stepped, output):
            return f"out of memory: {lacking}"
        return steps.end(status, output)
    if explained:
        return ""
    made = max((len(one.ends) for one in stepped), default=0)
    if made >= 2:
        return "the program used no GPU"
    return f"the program ended after {made} step{'s' * (made != 1)} of an optimizer of torch.optim: two at least can be told of"
