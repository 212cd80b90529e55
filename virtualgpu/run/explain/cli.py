"""`python -m virtualgpu --explain`: runs the program, as it is and with each change that could gain; and prints a column for each rank, then what
would gain most, or JSON."""

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from virtualgpu.environment import Settings
from virtualgpu.hardware.units import text_table
from virtualgpu.run import launcher, results, trials
from virtualgpu.run.explain.changes import (
    COMMUNICATION,
    COMPUTING,
    COPIES,
    LAUNCHES,
    LEAST,
    LOADER,
    NAMES,
    OTHER,
    WAITING,
    Change,
    Explained,
    Parts,
    amount,
    candidates,
    collect,
    mean,
)
from virtualgpu.run.report import names
from virtualgpu.run.trials import Programs, ended_by_sigterm, side_by_side

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
    settings: Settings,
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
        base = once(programs, settings, command, limit)
        patience = 60 + 20 * (time.monotonic() - begin)  # a change may make it wait for ever
        patience = min(patience, limit or patience)
        if base.failed:
            return Explanation(failed=base.failed, reads=base.reads)
        changes = candidates(base.explained, settings)
        ended = itertools.count(1)

        def again(change: Change) -> Tried:
            result = once(programs, settings._replace(explain=dict(change.setting)), command, patience)
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


def once(programs: Programs, settings: Settings, command: Sequence[str], limit: float | None = None) -> Run:
    """The program with these settings."""
    with launcher.folder() as path:
        environ = launcher.environment_of(settings._replace(folder=path), os.environ)
        status, output = programs.output_of(command, environ, path, limit)
        stepped, explained = trials.collect(path), collect(path)
        failed = _failed(status, output, stepped, explained)
        if failed:
            failed = results.lost(path, status, output) or failed
    return Run(explained, failed, trials.reads(output))


def _failed(status: int | None, output: str, stepped: Sequence[trials.Steps], explained: Sequence[Explained]) -> str:
    if status is None:
        return NOT_ENDED
    if status:
        if lacking := trials.lacking(stepped, output):
            return f"out of memory: {lacking}"
        return trials.end(status, output)
    if explained:
        return ""
    made = max((len(one.ends) for one in stepped), default=0)
    if made >= 2:
        return "the program used no GPU"
    return f"the program ended after {made} step{'s' * (made != 1)} of an optimizer of torch.optim: two at least can be told of"


# -- What is printed.


COLUMNS = 2  # of more ranks than so many: those with the least and the most work of their own, and the mean
NAMED = 2  # changes that are told in a sentence
WORDS = {
    COMPUTING: "computing",
    COMMUNICATION: "communication in the open",
    WAITING: "waiting for other ranks",
    LOADER: "waiting for the loader",
    LAUNCHES: "waiting for launches",
    COPIES: "copies from and to the host",
    OTHER: "slowed by communication",
}
ELSEWHERE = "waiting for other GPUs"  # OTHER, where a process has several
NOTHING = "No change that was tried makes the step more than 2 % shorter: it is what these GPUs take for this work."


def main(
    command: Sequence[str],
    settings: Settings,
    steps: int | None = None,
    jobs: int | None = None,
    limit: float | None = None,
    for_machines: bool = False,
) -> int:
    """Run the program and print. The status is 0 where there is something to tell, 2 where the program failed; 130 at an interrupt,
    of which, as of SIGTERM, no program is left.

    settings: the virtual GPUs. steps, jobs, limit: as of `run`. Raises ValueError for a program that is not there.
    """
    try:
        with ended_by_sigterm(), trials.line() as show:
            explanation = run(command, settings, STEPS if steps is None else steps, jobs, limit, show)
    except KeyboardInterrupt:
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    if explanation.failed and not for_machines:
        print(f"python -m virtualgpu: {explanation.failed}", file=sys.stderr)
    else:
        print(as_json(explanation) if for_machines else "\n".join(lines(explanation, machine(settings))))
    return 2 if explanation.failed else 0


def lines(explanation: Explanation, where: str) -> list[str]:
    """The table and the sentences. where: the machine, in words."""
    columns = _columns(explanation.rows)
    several = len({row.gpu for row in explanation.rows}) > 1 and len({row.rank for row in explanation.rows}) == 1
    words = {**WORDS, OTHER: ELSEWHERE} if several else WORDS
    rows = []
    for name in WORDS:
        if any(amount(parts, name) >= 2e-4 * parts.step for _, parts in columns):
            rows.append(_line(words[name], columns, functools.partial(amount, name=name)))
        for kind in NAMES if name == COMPUTING else ():
            if any(parts.computing.get(kind, 0.0) >= 0.005 * parts.step for _, parts in columns):
                rows.append(_line(f"  {kind}", columns, functools.partial(_computing, kind)))
    rows.append(_line("the step", columns, lambda parts: parts.step))
    if any(parts.hidden >= 5e-8 for _, parts in columns):
        rows.append(_line("communication hidden by computing", columns, lambda parts: parts.hidden))
    rows.insert(0, ["", *(head for head, _ in columns)])
    text = [f"virtualgpu: {where}: where an optimizer's step goes", *text_table(rows, left=(0,), gap="   ")]
    if explanation.has_loader:
        text.append("The loader was measured on this machine; all other times are simulated.")
    text += sentences(explanation)
    if explanation.reads:
        text.append(trials.not_known([explanation.reads]))
    return text


def sentences(explanation: Explanation) -> list[str]:
    """What would gain most, and what more was tried."""
    ran = [one for one in explanation.tried if one.step is not None]
    real = [one for one in ran if not one.change.bound]
    gains = [one for one in real if explanation.gain(one) >= LEAST * explanation.step]
    text, causes = [], set()
    for one in gains[:NAMED]:
        cause = "" if one.change.cause in causes else _cause(explanation, one)
        times = f"the step would take {milliseconds(one.step)} (now {milliseconds(explanation.step)})"
        text.append(f"{cause}{one.change.words}, {times}.")
        causes.add(one.change.cause)
    if not gains:
        text.append(NOTHING)
    text += [
        f"{one.change.words}, it would take {milliseconds(one.step)}: no link and no bucket gives more."
        for one in ran
        if one.change.bound and one.change.cause in causes
    ]
    if more := gains[NAMED:] + [one for one in real if one not in gains]:
        text.append(f"Also tried: {', '.join(f'{one.change.name} {milliseconds(one.step)}' for one in more)}.")
    text += [
        f"Not known: {one.change.name}, for the run with it failed ({one.words})."
        for one in explanation.tried
        if one.step is None
    ]
    return text


def _cause(explanation: Explanation, tried: Tried) -> str:
    row = max(explanation.rows, key=lambda row: amount(row.parts, tried.change.cause) / row.parts.step)
    share = 100 * amount(row.parts, tried.change.cause) / row.parts.step
    cause = WORDS[tried.change.cause].capitalize()
    whose = "the" if row.rank < 0 or len({row.rank for row in explanation.rows}) == 1 else f"rank {row.rank}'s"
    return f"{cause} takes {share:.0f} % of {whose} step. "


def _columns(rows: Sequence[Row]) -> list[tuple[str, Parts]]:
    several = len({row.gpu for row in rows if row.rank == rows[0].rank}) > 1
    named = []
    for row in rows:
        names = [f"rank {row.rank}"] * (row.rank >= 0) + [f"GPU {row.gpu}"] * (several or row.rank < 0)
        named.append((" ".join(names), row.parts))
    if len(named) <= COLUMNS:
        return named
    (least, first), *_, (most, last) = sorted(named, key=lambda column: column[1].work)
    average = mean([row.parts for row in rows])
    return [(f"{least}, least work", first), (f"{most}, most work", last), (f"mean of {len(named)}", average)]


def _computing(kind: str, parts: Parts) -> float:
    return parts.computing.get(kind, 0.0)


def _line(name: str, columns: Sequence[tuple[str, Parts]], value: Callable[[Parts], float]) -> list[str]:
    """The name, then time and share of each column."""
    return [name, *(f"{milliseconds(value(parts))} {100 * value(parts) / parts.step:3.0f} %" for _, parts in columns)]


def milliseconds(seconds: float | None) -> str:
    """Three digits, or as many as stand before the point: 0.0421 ms, 3.21 ms, 1,234 ms."""
    value = 1e3 * (seconds or 0.0)
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 9.995 else f"{value:.2f} ms"


def machine(settings: Settings) -> str:
    """The virtual GPUs, in words."""
    cards = names(settings.cards)
    return f"{cards}, rank {settings.single_rank[1]} of {settings.single_rank[0]}" if settings.single_rank else cards


def as_json(explanation: Explanation) -> str:
    """Seconds as they are: the step, each rank's parts, and what was tried with what the step took."""
    rows = [
        {"rank": row.rank, "gpu": row.gpu, **row.parts._asdict(), "work": row.parts.work} for row in explanation.rows
    ]
    tried = [
        {"change": change.name, "words": change.words, "cause": change.cause, "bound": change.bound, "step": step}
        | {"gain": explanation.gain(Tried(change, step)), "failed": failed}
        for change, step, failed in explanation.tried
    ]
    record = {"step": explanation.step, "rows": rows, "tried": tried, "failed": explanation.failed}
    return json.dumps({**record, "reads": explanation.reads, "loader_measured_here": explanation.has_loader}, indent=1)
