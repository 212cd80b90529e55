"""The graders of notebook 03: pipelines in one process."""

import copy
import random
from collections.abc import Callable, Iterable
from functools import partial

from checks.grader import grader, launched, plain


@grader
def slots(table: Callable[[int, int], list]) -> str | None:
    """table(stages, micro_batches) is a list of rows, one a stage: which micro-batch (or None) it works on in each slot."""
    draw = random.Random()
    sizes = ((2, 4), (3, 4), (4, 8), (5, 2), (1, 3), (draw.randint(2, 9), draw.randint(1, 20)))
    found = launched(answers, partial(_rows, table), sizes, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (stages, pieces), rows in zip(sizes, found[0], strict=True):
        here = f"with {stages} stages and {pieces} micro-batches"
        if rows is None:
            return f"{here}, it returns None; a list of rows is wanted"
        if len(rows) != stages or len({len(row) for row in rows}) != 1:
            return f"{here}, there should be {stages} rows of one length, not {[len(row) for row in rows]}"
        for stage, row in enumerate(rows):
            if not _each_once([piece for piece in row if piece is not None], pieces):
                return f"{here}, stage {stage} should work on each of 0 to {pieces - 1} once; it works on {row} (None: on nothing)"
            for piece in range(pieces):
                if stage and row.index(piece) <= rows[stage - 1].index(piece):
                    return f"{here}, stage {stage} begins {piece} in slot {row.index(piece)}, before stage {stage - 1} has finished it"
        if len(rows[0]) > pieces + stages - 1:
            return f"{here}, stage {stages - 1} waits {rows[-1].count(None)} of {len(rows[-1])} slots; it need not wait more than {stages - 1}"
    return None


def _rows(table: Callable, stages: int, pieces: int) -> list[list] | None:
    """As lists of plain numbers, whatever sequences the reader's are."""
    rows = table(stages, pieces)
    return None if rows is None else [[plain(piece) for piece in row] for row in rows]


def _each_once(worked: list, pieces: int) -> bool:
    return len(worked) == pieces and all(piece in worked for piece in range(pieces))


def answers(function: Callable, cases: Iterable[tuple]) -> list:
    """In a process of its own, which ends also where the reader's loop does not."""
    return [plain(function(*copy.deepcopy(case))) for case in cases]
