"""The graders of notebook 03: pipelines."""

from collections.abc import Callable

from checks.grader import grader, launched


@grader
def slots(table: Callable[[int, int], list]) -> str | None:
    """table(stages, micro_batches) is a list of rows, one a stage: which micro-batch (or None) it works on in each slot."""
    for stages, pieces in ((2, 4), (3, 4), (4, 8)):
        rows = [list(row) for row in table(stages, pieces)]
        here = f"with {stages} stages and {pieces} micro-batches"
        if len(rows) != stages or len({len(row) for row in rows}) != 1:
            return f"{here}, there should be {stages} rows of one length, not {[len(row) for row in rows]}"
        for stage, row in enumerate(rows):
            if sorted(piece for piece in row if piece is not None) != list(range(pieces)):
                return f"{here}, stage {stage} should work on each of 0 to {pieces - 1} once; it works on {row}"
            for piece in range(pieces):
                if stage and row.index(piece) <= rows[stage - 1].index(piece):
                    return f"{here}, stage {stage} begins {piece} in slot {row.index(piece)}, before stage {stage - 1} has finished it"
        if len(rows[0]) > pieces + stages - 1:
            return f"{here}, stage {stages - 1} waits {rows[-1].count(None)} of {len(rows[-1])} slots; it need not wait more than {stages - 1}"
    return None


@grader
def micro_batches(choose: Callable[[int, float, float], int]) -> str | None:
    """choose(stages, batch_mib, budget) is the smallest n with a bubble under 10 % and 1F1B's pieces within the budget."""
    for stages, batch, budget in ((2, 4000, 4000), (4, 4000, 1000), (4, 4000, 100), (8, 1000, 10), (1, 500, 500)):
        n = choose(stages, batch, budget)
        here = f"for {stages} stages, {batch} MiB and a budget of {budget}, n = {n}"
        bubble, held = (lambda n, m=stages: (m - 1) / (n + m - 1)), (lambda n, m=stages, b=batch: b * min(m, n) / n)
        if not isinstance(n, int) or n < 1:
            return f"{here}: it should be a whole number from 1 on"
        if bubble(n) >= 0.1:
            return f"{here}: the bubble is {bubble(n):.0%}, not under 10 %"
        if held(n) > budget:
            return f"{here}: a stage holds {held(n):,.0f} MiB"
        if n > 1 and bubble(n - 1) < 0.1 and held(n - 1) <= budget:
            return f"{here}: right, but {n - 1} would do, and needs fewer launches"
    return None


@grader
def exchanged(worker: Callable[[], list]) -> str | None:
    """In two processes, each rank returns [the other's rank] * 2, within three seconds."""
    found = launched(worker, timeout=3, ask="who sends first?")
    if isinstance(found, str):
        return found
    if found != [[1.0, 1.0], [0.0, 0.0]]:
        return (
            f"it ends, but returns {found[0]} on rank 0 and {found[1]} on rank 1; each should have the other's number"
        )
    return None
