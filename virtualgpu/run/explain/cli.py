"""`python -m virtualgpu --explain`, its options read; and what it prints: a column for each rank, then what would gain most, or JSON."""

import functools
import json
import sys
from collections.abc import Callable, Sequence

from virtualgpu.environment import Settings
from virtualgpu.run.explain import real, runs
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
    Parts,
    amount,
    mean,
)
from virtualgpu.run.explain.runs import Explanation, Row, Tried
from virtualgpu.run.report import columns as aligned
from virtualgpu.run.report import names
from virtualgpu.run.trials import steps as trials
from virtualgpu.run.trials.programs import ended_by_sigterm

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
REAL = "this machine's GPUs, by torch.profiler (which makes launches slower)"
ON_VIRTUAL = "What a change would gain is found on virtual GPUs: --explain with --gpus and --like."
NOTHING = "No change that was tried makes the step more than 2 % shorter: it is what these GPUs take for this work."


def main(
    command: Sequence[str],
    settings: Settings,
    on_real: bool,
    steps: int | None = None,
    jobs: int | None = None,
    limit: float | None = None,
    for_machines: bool = False,
) -> int:
    """Run the program and print. The status is 0 where there is something to tell, 2 where the program failed; 130 at an interrupt,
    of which, as of SIGTERM, no program is left.

    settings: the virtual GPUs. steps, jobs, limit: as of `runs.run`. on_real: this machine's own GPUs are taken, if it has some.

    Raises ValueError for a program that is not there.
    """
    steps = runs.STEPS if steps is None else steps
    try:
        with ended_by_sigterm(), trials.line() as show:
            if on_real and real.gpus():
                where, explanation = REAL, real.run(command, steps, limit, show)
            else:
                where = machine(settings)
                explanation = runs.run(command, settings, steps, jobs, limit, show)
    except KeyboardInterrupt:
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    if explanation.failed and not for_machines:
        print(f"python -m virtualgpu: {explanation.failed}", file=sys.stderr)
    else:
        print(as_json(explanation) if for_machines else "\n".join(lines(explanation, where)))
    return 2 if explanation.failed else 0


def lines(explanation: Explanation, where: str) -> list[str]:
    """The table and the sentences. where: the machine, in words."""
    if explanation.failed:
        return [f"virtualgpu: {where}: {explanation.failed}"]
    columns = _columns(explanation.rows)
    several = len({row.gpu for row in explanation.rows}) > 1 and len({row.rank for row in explanation.rows}) == 1
    words = {**WORDS, OTHER: ELSEWHERE} if several else WORDS
    rows = []
    for name in WORDS:
        if any(amount(parts, name) >= 2e-4 * parts.step for _, parts in columns):
            rows.append(_line(words[name], columns, functools.partial(_amount, name)))
        for kind in NAMES if name == COMPUTING else ():
            if any(parts.computing.get(kind, 0.0) >= 0.005 * parts.step for _, parts in columns):
                rows.append(_line(f"  {kind}", columns, functools.partial(_computing, kind)))
    rows.append(_line("the step", columns, lambda parts: parts.step))
    if any(parts.hidden >= 5e-8 for _, parts in columns):
        rows.append(_line("communication hidden by computing", columns, lambda parts: parts.hidden))
    rows.insert(0, ["", *(head for head, _ in columns)])
    text = [f"virtualgpu: {where}: where an optimizer's step goes", *aligned(rows, left=(0,), gap="   ")]
    if where == REAL:
        return [*text, ON_VIRTUAL]
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
        text.append(_cause(explanation, one) * (one.change.cause not in causes) + _gain(explanation, one))
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


def _gain(explanation: Explanation, tried: Tried) -> str:
    now = milliseconds(explanation.step)
    return f"{tried.change.words}, the step would take {milliseconds(tried.step)} (now {now})."


def _cause(explanation: Explanation, tried: Tried) -> str:
    row = max(explanation.rows, key=lambda row: amount(row.parts, tried.change.cause) / row.parts.step)
    share = 100 * amount(row.parts, tried.change.cause) / row.parts.step
    cause = WORDS[tried.change.cause].capitalize()
    verb = "take" if tried.change.cause == COPIES else "takes"
    whose = "the" if row.rank < 0 or len({row.rank for row in explanation.rows}) == 1 else f"rank {row.rank}'s"
    return f"{cause} {verb} {share:.0f} % of {whose} step. "


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


def _amount(name: str, parts: Parts) -> float:
    return amount(parts, name)


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
