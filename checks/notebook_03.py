"""The graders of notebook 03: pipelines in one process."""

import copy
import random
from collections.abc import Callable, Iterable
from functools import partial

from checks.grader import grader, launched, plain


@grader
def slots(table: Callable[[int, int], list]) -> str | None:
    """table(stages, micro_batches) is a list of rows, one a stage: in each slot "F3" (forward of 3), "B3" (its backward) or None."""
    draw = random.Random()
    sizes = ((2, 4), (3, 4), (4, 8), (5, 2), (1, 3), (draw.randint(2, 9), draw.randint(1, 20)))
    found = launched(answers, partial(_rows, table), sizes, nprocs=1, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (stages, pieces), rows in zip(sizes, found[0], strict=True):
        if complaint := _table_complaint(stages, pieces, rows):
            return f"with {stages} stages and {pieces} micro-batches, {complaint}"
    return None


def _table_complaint(stages: int, pieces: int, rows: list[list] | None) -> str | None:
    if rows is None:
        return "it returns None; a list of rows is wanted"
    if len(rows) != stages or len({len(row) for row in rows}) != 1:
        return f"there should be {stages} rows of one length, not {[len(row) for row in rows]}"
    for stage, row in enumerate(rows):
        for way in "FB":
            expected = [f"{way}{piece}" for piece in range(pieces)]
            if sorted(work for work in row if str(work).startswith(way)) != sorted(expected):
                return f"stage {stage} should have each of {way}0 to {expected[-1]} once; it has {row} (None: nothing)"
        if len(row) - row.count(None) != 2 * pieces:
            return f"stage {stage} has something besides F, B and None: {row}"
        for piece in range(pieces):
            forward, backward = f"F{piece}", f"B{piece}"
            if stage and row.index(forward) <= rows[stage - 1].index(forward):
                return f"stage {stage} begins {forward} in slot {row.index(forward)}, before stage {stage - 1} has finished it"
            if stage and rows[stage - 1].index(backward) <= row.index(backward):
                slot = rows[stage - 1].index(backward)
                return f"stage {stage - 1} begins {backward} in slot {slot}, before stage {stage} has finished it"
            if row.index(backward) <= row.index(forward):
                return f"stage {stage} begins {backward} in slot {row.index(backward)}, before its own {forward}"
    if len(rows[0]) > 2 * (pieces + stages - 1):
        waits = len(rows[0]) - 2 * pieces
        return f"each stage waits {waits} of {len(rows[0])} slots; it need not wait more than {2 * (stages - 1)}"
    return None


def _rows(table: Callable, stages: int, pieces: int) -> list[list] | None:
    """As lists of plain words, whatever sequences the reader's are; ("F", 3) is "F3"."""
    rows = table(stages, pieces)
    return None if rows is None else [[_word(work) for work in row] for row in rows]


def _word(work):
    return "".join(map(str, work)) if isinstance(work, tuple | list) else plain(work)


CUTS, SIZES, QUESTIONS = range(1, 23), (2, 3, 5, 8, 10, 12, 15, 20, 30, 40, 60, 120), 45


@grader
def fastest_plan(choose: Callable) -> str | None:
    """choose(cuts, sizes, measure, budget) returns (cut, size) of the fastest step whose fuller GPU needs at most `budget` MiB,
    within 8 %, or None. measure(cut, size) returns (milliseconds, MiB of the fuller GPU), and may be asked 45 times."""
    tables = [_pipelines(seed) for seed in (0, 1, 2, random.randrange(10**6))]
    cases = [(table, budget) for table in tables for budget in _budgets(table)]
    found = launched(_chosen, choose, cases, nprocs=1, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (table, budget), (answer, asked) in zip(cases, found[0], strict=True):
        if complaint := _plan_complaint(table, budget, answer, asked):
            return complaint
    return None


def _plan_complaint(table: dict, budget: float, answer, asked: int) -> str | None:
    fitting = {plan: ms for plan, (ms, mib) in table.items() if mib <= budget}
    if asked > QUESTIONS:
        return (
            f"{QUESTIONS} dry runs are allowed for {len(table)} plans, and you asked for more: which need no question?"
        )
    if answer is None:
        return f"it found no plan for {budget:,.0f} MiB, but {len(fitting)} of {len(table)} fit" if fitting else None
    if answer not in table:
        return f"it returned {answer!r}, which is not a pair of a cut and a size from the lists"
    if answer not in fitting:
        what = f"cut {answer[0]} with pieces of {answer[1]} needs {table[answer][1]:,.0f} MiB on the fuller GPU"
        return f"{what}, and the budget is {budget:,.0f}" + ("" if fitting else ": nothing fits, return None")
    best = min(fitting, key=fitting.get)
    if fitting[answer] > 1.08 * fitting[best]:
        return (
            f"with {budget:,.0f} MiB, cut {answer[0]} with pieces of {answer[1]} takes {fitting[answer]:.0f} ms; "
            f"another plan that fits takes {fitting[best]:.0f}"
        )
    return None


def _chosen(choose: Callable, cases: list[tuple[dict, float]]) -> list[tuple]:
    """In a process of its own: each answer, and how often it measured for it."""
    answers = []
    for table, budget in cases:
        asked = []

        def measure(cut, size, table=table, asked=asked):
            asked.append((cut, size))
            if len(asked) > QUESTIONS:
                raise _Enough
            return table[plain(cut), plain(size)]

        try:
            answer = choose(list(CUTS), list(SIZES), measure, budget)
        except _Enough:
            answer = None
        answers.append((None if answer is None else tuple(map(plain, answer)), len(asked)))
    return answers


class _Enough(BaseException):
    """More questions than are allowed. Not an Exception: the reader's `except` does not catch it."""


def _pipelines(seed: int) -> dict[tuple[int, int], tuple[float, float]]:
    """{(cut, size): (ms, MiB of the fuller GPU)} of a model and a card that are drawn: 23 blocks, whose activations shrink and
    whose parameters grow with depth; two stages and GPipe's slots; a price a kernel, whatever the piece."""
    draw = random.Random(seed)
    images, launch = 120, (0.02, 0.2, 2.0)[seed % 3]
    work = [draw.uniform(0.2, 1.0) / 12 for _ in range(23)]  # ms an image
    kept = [draw.uniform(0.8, 1.2) * 3 * 0.86**block for block in range(23)]  # MiB an image
    weights = [4 * 1.12**block for block in range(23)]
    table = {}
    for cut in CUTS:
        parts = slice(None, cut), slice(cut, None)
        for size in SIZES:
            pieces = images // size
            stages = [size * sum(work[part]) + launch * len(work[part]) for part in parts]
            milliseconds = 3 * (sum(stages) + (pieces - 1) * max(stages))
            mib = max(images * sum(kept[part]) + 3 * sum(weights[part]) for part in parts)
            table[cut, size] = milliseconds, mib
    return table


def _budgets(table: dict) -> list[float]:
    """What all plans keep to, what the fastest does not, what few do, and what none does."""
    needs = sorted(mib for _, mib in table.values())
    fastest = min(table.values())
    return [needs[-1], 0.97 * fastest[1], 1.1 * needs[0], 0.5 * needs[0]]


def answers(function: Callable, cases: Iterable[tuple]) -> list:
    """In a process of its own, which ends also where the reader's loop does not."""
    return [plain(function(*copy.deepcopy(case))) for case in cases]
