"""What `--explain` prints: a column for each rank, then what would gain most; or all of it as JSON."""

import json
from collections.abc import Sequence

from virtualgpu.environment import Settings
from virtualgpu.run.explain.candidates import COMPUTING, LEAST, amount
from virtualgpu.run.explain.parts import (
    COMMUNICATION,
    COPIES,
    LAUNCHES,
    LOADER,
    NAMES,
    OTHER,
    WAITING,
    Parts,
    mean,
)
from virtualgpu.run.explain.runs import Explanation, Row, Tried
from virtualgpu.run.table import names
from virtualgpu.run.trials import messages

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


def lines(found: Explanation, where: str) -> list[str]:
    """The table and the sentences. where: the machine, in words."""
    if found.failed:
        return [f"virtualgpu: {where}: {found.failed}"]
    columns = _columns(found.rows)
    several = len({row.gpu for row in found.rows}) > 1 and len({row.rank for row in found.rows}) == 1
    words = {**WORDS, OTHER: ELSEWHERE} if several else WORDS
    rows = [("", *[cell for head, _ in columns for cell in (head, "")])]
    for name in WORDS:
        if any(amount(parts, name) >= 5e-8 for _, parts in columns):
            rows.append((words[name], *_cells(columns, lambda parts, name=name: amount(parts, name))))
        for kind in NAMES if name == COMPUTING else ():
            if any(parts.computing.get(kind, 0.0) >= 0.005 * parts.step for _, parts in columns):
                rows.append((f"  {kind}", *_cells(columns, lambda parts, kind=kind: parts.computing.get(kind, 0.0))))
    rows.append(("the step", *_cells(columns, lambda parts: parts.step)))
    if any(parts.hidden >= 5e-8 for _, parts in columns):
        rows.append(("communication hidden by computing", *_cells(columns, lambda parts: parts.hidden)))
    told = [f"virtualgpu: {where}: where an optimizer's step goes", *_aligned(rows)]
    if where == REAL:
        return [*told, ON_VIRTUAL]
    if found.has_loader:
        told.append("The loader was measured on this machine; all other times are simulated.")
    told += sentences(found)
    if found.reads:
        told.append(messages.not_known([found.reads]))
    return told


def sentences(found: Explanation) -> list[str]:
    """What would gain most, and what more was tried."""
    gains = [one for one in found.tried if not one.change.bound and found.gain(one) >= LEAST * found.step]
    told, causes = [], set()
    for one in gains[:NAMED]:
        told.append(_cause(found, one) * (one.change.cause not in causes) + _gain(found, one))
        causes.add(one.change.cause)
    if not gains:
        told.append(NOTHING)
    for one in found.tried:
        if one.change.bound and one.step is not None and one.change.cause in causes:
            told.append(
                f"{one.change.words}, it would take {milliseconds(one.step)}: no link and no bucket gives more."
            )
    more = [f"{one.change.name} {milliseconds(one.step)}" for one in gains[NAMED:]]
    more += [
        f"{one.change.name} {milliseconds(one.step)}"
        for one in found.tried
        if one not in gains and one.step is not None and not one.change.bound
    ]
    if more:
        told.append(f"Also tried: {', '.join(more)}.")
    told += [
        f"Not known: {one.change.name}, for the run with it failed ({one.words})."
        for one in found.tried
        if one.step is None
    ]
    return told


def _gain(found: Explanation, tried: Tried) -> str:
    return f"{tried.change.words}, the step would take {milliseconds(tried.step)} (now {milliseconds(found.step)})."


def _cause(found: Explanation, tried: Tried) -> str:
    row = max(found.rows, key=lambda row: amount(row.parts, tried.change.cause) / row.parts.step)
    share = 100 * amount(row.parts, tried.change.cause) / row.parts.step
    cause = WORDS[tried.change.cause].capitalize()
    verb = "take" if tried.change.cause == COPIES else "takes"
    whose = "the" if row.rank < 0 or len({row.rank for row in found.rows}) == 1 else f"rank {row.rank}'s"
    return f"{cause} {verb} {share:.0f} % of {whose} step. "


def _columns(rows: Sequence[Row]) -> list[tuple[str, Parts]]:
    several = len({row.gpu for row in rows if row.rank == rows[0].rank}) > 1
    named = [
        (
            f"rank {row.rank}" * (row.rank >= 0)
            + " " * (row.rank >= 0 and several)
            + f"GPU {row.gpu}" * (several or row.rank < 0),
            row.parts,
        )
        for row in rows
    ]
    if len(named) <= COLUMNS:
        return named
    named.sort(key=lambda column: column[1].work)
    (least, first), (most, last) = named[0], named[-1]
    return [
        (f"{least}, least work", first),
        (f"{most}, most work", last),
        (f"mean of {len(named)}", mean([row.parts for row in rows])),
    ]


def _cells(columns, value) -> list[str]:
    cells = []
    for _, parts in columns:
        cells += [milliseconds(value(parts)), f"{100 * value(parts) / parts.step:.0f} %"]
    return cells


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left. A column's title stands over both its figures, time and share."""
    names = max(len(row[0]) for row in rows)
    title, *figures = rows
    widths = [max(len(row[at]) for row in figures) for at in range(1, len(title))]
    for at in range(0, len(widths), 2):
        widths[at] = max(widths[at], len(title[at + 1]) - widths[at + 1] - 1)
    told = [
        " " * names
        + "".join(f"   {title[at + 1]:>{widths[at] + 1 + widths[at + 1]}}" for at in range(0, len(widths), 2))
    ]
    for row in figures:
        cells = [f"   {row[at + 1]:>{widths[at]}} {row[at + 2]:>{widths[at + 1]}}" for at in range(0, len(widths), 2)]
        told.append(f"{row[0]:<{names}}" + "".join(cells))
    return told


def milliseconds(seconds: float) -> str:
    """Three digits, or as many as stand before the point: 0.0421 ms, 3.21 ms, 1,234 ms."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 9.995 else f"{value:.2f} ms"


def machine(settings: Settings) -> str:
    """The virtual GPUs, in words."""
    cards = names(settings.cards)
    return f"{cards}, rank {settings.single_rank[1]} of {settings.single_rank[0]}" if settings.single_rank else cards


def as_json(found: Explanation) -> str:
    """Seconds as they are: the step, each rank's parts, and what was tried with what the step took."""
    rows = [{"rank": row.rank, "gpu": row.gpu, **row.parts._asdict(), "work": row.parts.work} for row in found.rows]
    tried = [
        {
            "change": one.change.name,
            "words": one.change.words,
            "cause": one.change.cause,
            "bound": one.change.bound,
            "step": one.step,
            "gain": found.gain(one),
            "failed": one.words,
        }
        for one in found.tried
    ]
    told = {"step": found.step, "rows": rows, "tried": tried, "failed": found.failed, "reads": found.reads}
    return json.dumps({**told, "loader_measured_here": found.has_loader}, indent=1)
