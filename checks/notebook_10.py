"""The graders of notebook 10: pipelines of processes."""

import hashlib
import os
import random
import re
from collections.abc import Callable

import torch
import torch.distributed as dist

from checks.grader import grader, launched, launched_on_gpus
from checks.notebook_03 import answers

SENT = (
    2 << 20
)  # numbers, 8 MiB: NCCL holds a message back that is larger than its buffer of 4 MiB, and both senders wait


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
