"""The graders of notebook 11: pipelines of processes."""

import functools
import hashlib
import itertools
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
def one_f_one_b(table: Callable[[int, int], list]) -> str | None:
    """table(stages, micro_batches): each stage's order of work, "F0" and "B0", which 1F1B's slots and memory are asked of."""
    draw = random.Random()
    sizes = ((3, 4), (2, 4), (4, 8), (1, 3), (5, 2), (draw.randint(2, 9), draw.randint(1, 20)))
    result = launched(answers, functools.partial(_orders, table), sizes, nprocs=1, ask="does your loop end?")
    if isinstance(result, str):
        return result
    for (stages, number), orders in zip(sizes, result[0], strict=True):
        here = f"with {stages} stages and {number} micro-batches"
        if orders is None or len(orders) != stages:
            return f"{here}, a list for each stage is wanted: {stages} lists of words such as F0 and B0"
        whole = sorted(f"{kind}{n}" for kind in "FB" for n in range(number))
        for stage, order in enumerate(orders):
            if sorted(order) != whole:
                return f"{here}, stage {stage} should do each of F0 to F{number - 1} and of B0 to B{number - 1} once; it does {' '.join(order)}"
            keeps, most = _kept(order), min(stages - stage, number)
            if keeps > most:
                return f"{here}, stage {stage} keeps {keeps} micro-batches at once; {most} are enough: begin backward sooner"
        slots = _slots(orders)
        if slots is None:
            return f"{here}, the stages wait for each other, and none can go on"
        if slots > 2 * (number + stages - 1):
            return (
                f"{here}, it takes {slots} slots; {2 * (number + stages - 1)} are enough: which stage starts too late?"
            )
    return None


def _orders(table: Callable, stages: int, number: int) -> list[list[str]] | None:
    """As lists of words, whatever sequences the reader's are."""
    orders = table(stages, number)
    return None if orders is None else [[str(work) for work in order] for order in orders]


def _kept(order: list[str]) -> int:
    """How many micro-batches are between their forward and their backward at most."""
    kept = itertools.accumulate(1 if work[0] == "F" else -1 for work in order)
    return max(kept)


def _slots(orders: list[list[str]]) -> int | None:
    """How many slots of equal length it takes; None where nobody can go on."""
    left, done, slots = [list(order) for order in orders], set(), 0
    while any(left):
        ready = [
            (stage, todo[0]) for stage, todo in enumerate(left) if todo and _needs(todo[0], stage, len(left)) <= done
        ]
        if not ready:
            return None
        for stage, _ in ready:
            left[stage].pop(0)
        done.update(ready)
        slots += 1
    return slots


def _needs(work: str, stage: int, stages: int) -> set[tuple[int, str]]:
    if work[0] == "F":
        return {(stage - 1, work)} if stage else set()
    return {(stage, "F" + work[1:])} | ({(stage + 1, work)} if stage < stages - 1 else set())


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
