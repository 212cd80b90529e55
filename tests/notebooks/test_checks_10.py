"""The graders of notebook 10: the number of micro-batches, and an exchange that must not wait for ever."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import checks

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def for_ever(*what):
    while True:
        pass


def smallest(stages, batch, budget):
    return next(
        n for n in range(1, 10_000) if (stages - 1) / (n + stages - 1) < 0.1 and batch * min(stages, n) / n <= budget
    )


@pytest.mark.parametrize(
    "choose, complaint",
    [
        (lambda stages, batch, budget: stages, "n = 2: the bubble is 33%, not under 10 %"),
        (lambda stages, batch, budget: 9 * (stages - 1) + 1, "a stage holds 571.4 MiB"),
        (lambda stages, batch, budget: smallest(stages, batch, budget) + 1, "right, but 10 would do"),
        (lambda stages, batch, budget: 2.5, "it should be a whole number"),
        (
            lambda stages, batch, budget: max(9 * (stages - 1) + 1, batch * stages // budget),
            "n = 42: a stage holds 71.4 MiB",
        ),
        (smallest, "[passed]"),
        (lambda *case: float(smallest(*case)), "[passed]"),
        (lambda *case: np.int64(smallest(*case)), "[passed]"),
        (lambda *case: torch.tensor(smallest(*case)), "[passed]"),
    ],
)
def test_micro_batches(capsys, choose, complaint):
    checks.micro_batches(choose)
    assert complaint in capsys.readouterr().out


@pytest.mark.parametrize("grade", [checks.micro_batches])
def test_an_endless_loop_is_told(capsys, hurried, grade):
    grade(for_ever)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after ") and "in for_ever" in out and "does your loop end?" in out, out


def exchange(mine, send_first, send=dist.send):
    """The other's numbers, by one call after the other."""
    theirs, other, sending = torch.empty_like(mine), 1 - dist.get_rank(), None
    if send_first(dist.get_rank()):
        sending = send(mine, dst=other)
    dist.recv(theirs, src=other)
    if not send_first(dist.get_rank()):
        dist.send(mine, dst=other)
    if sending is not None:
        sending.wait()
    return theirs


def at_once(mine):
    theirs, other = torch.empty_like(mine), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]):
        work.wait()
    return theirs


@pytest.mark.parametrize(
    "worker, complaint",
    [
        (at_once, "[passed]"),
        (lambda mine: exchange(mine, lambda rank: rank == 1), "[passed]"),
        (lambda mine: exchange(mine, lambda rank: True, dist.isend), "both ranks send first, and NCCL would hang"),
        (lambda mine: torch.full_like(mine, 1.0 - dist.get_rank()), "rank 0 returns other numbers than those that were sent"),
        (lambda mine: mine, "rank 0 returns its own numbers"),
        (lambda mine: at_once(mine) / undefined, "raised NameError: name 'undefined'"),  # noqa: F821
        (lambda mine: None, "raised AttributeError"),
    ],
)  # fmt: skip
def test_exchanged(capsys, worker, complaint):
    checks.exchanged(worker)
    out = capsys.readouterr().out
    assert complaint in out, out


@pytest.mark.parametrize(
    "worker, place", [(lambda mine: exchange(mine, lambda rank: False), "waits in recv"), (for_ever, "in for_ever")]
)
def test_an_exchange_that_waits_for_ever_is_told(capsys, hurried, worker, place):
    """And where: the call of torch.distributed, not the virtual GPUs' part of it."""
    checks.exchanged(worker)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after 3 seconds rank 0") and out.count(place) == 2 and "who sends first?" in out, (
        out
    )
