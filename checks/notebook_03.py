"""The graders of notebook 03: pipelines."""

import copy
import functools
import hashlib
import os
import random
import re
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from checks.grader import grader, launched, launched_on_gpus, plain

SENT = (
    2 << 20
)  # numbers, 8 MiB: NCCL holds a message back that is larger than its buffer of 4 MiB, and both senders wait


@grader
def slots(table: Callable[[int, int], list]) -> str | None:
    """table(stages, micro_batches) is a list of rows, one a stage: which micro-batch (or None) it works on in each slot."""
    draw = random.Random()
    sizes = ((2, 4), (3, 4), (4, 8), (5, 2), (1, 3), (draw.randint(2, 9), draw.randint(1, 20)))
    found = launched(answers, functools.partial(_rows, table), sizes, ask="does your loop end?")
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


@grader
def micro_batches(choose: Callable[[int, float, float], int]) -> str | None:
    """choose(stages, batch_mib, budget) is the smallest n with a bubble under 10 % and 1F1B's pieces within the budget."""
    draw = random.Random()
    cases = ((2, 4000, 4000), (4, 4000, 1000), (4, 4000, 100), (3, 1000, 70), (8, 1000, 10), (1, 500, 500))
    cases = (*cases, (draw.randint(2, 9), draw.randint(1000, 9000), draw.randint(20, 400)))
    found = launched(answers, choose, cases, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (stages, batch, budget), n in zip(cases, found[0], strict=True):
        here = f"for {stages} stages, {batch} MiB and a budget of {budget}, n = {n}"
        bubble, held = (lambda n, m=stages: (m - 1) / (n + m - 1)), (lambda n, m=stages, b=batch: b * min(m, n) / n)
        if not isinstance(n, int | float) or n < 1 or n != int(n):
            return f"{here}: it should be a whole number from 1 on"
        if bubble(n) >= 0.1:
            return f"{here}: the bubble is {bubble(n):.0%}, not under 10 %"
        if held(n) > budget:
            return f"{here}: a stage holds {held(n):,.1f} MiB"
        if n > 1 and bubble(n - 1) < 0.1 and held(n - 1) <= budget:
            return f"{here}: right, but {n - 1:.0f} would do, and needs fewer launches"
    return None


def answers(function: Callable, cases: Iterable[tuple]) -> list:
    """In a process of its own, which ends also where the reader's loop does not."""
    return [plain(function(*copy.deepcopy(case))) for case in cases]


@grader
def exchanged(exchange: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """In two ranks, each with a GPU: exchange(mine) returns the other's numbers (8 MiB, drawn here), and does not wait for ever."""
    found = launched_on_gpus(
        _exchange_drawn, exchange, int.from_bytes(os.urandom(4), "little"), timeout=3, ask="who sends first?"
    )
    if isinstance(found, str):  # whichever of the two was first to find that both wait
        return re.sub(r"^rank \d raised \S+DistBackendError: \w+ \w+ rank \d: ", "", found)
    for rank, (came, mine, theirs) in enumerate(found):
        if came != theirs:
            what = "its own numbers" if came == mine else "other numbers than those that were sent"
            return f"it ends, but rank {rank} returns {what}"
    return None


def _exchange_drawn(exchange: Callable, seed: int) -> tuple:
    """A fingerprint of what this rank got, of what it had, and of what the other had."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    drawn = [torch.randn(SENT, generator=torch.Generator().manual_seed(seed + number)) for number in range(2)]
    came = exchange(drawn[rank].cuda())
    return tuple(_fingerprint(numbers) for numbers in (came, drawn[rank], drawn[1 - rank]))


def _fingerprint(numbers: torch.Tensor) -> str:
    return hashlib.sha256(numbers.detach().cpu().numpy().tobytes()).hexdigest()
