"""The graders of notebook 10: 1F1B's table, and an exchange that must not wait for ever."""

import time

import pytest
import torch
import torch.distributed as dist

import checks

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def for_ever(*what):
    while True:
        time.sleep(0.01)


def table(stages, number, first=lambda stages, stage: stages - 1 - stage):
    orders = []
    for stage in range(stages):
        ahead = min(first(stages, stage), number)
        order = [f"F{n}" for n in range(ahead)]
        for n in range(ahead, number):
            order += [f"F{n}", f"B{n - ahead}"]
        orders.append(order + [f"B{n}" for n in range(number - ahead, number)])
    return orders


def gpipe(stages, number):
    return [[f"{kind}{n}" for kind in "FB" for n in range(number)] for _ in range(stages)]


@pytest.mark.parametrize(
    "write, complaint",
    [
        (gpipe, "with 3 stages and 4 micro-batches, stage 0 keeps 4 micro-batches at once; 3 are enough"),
        (lambda m, n: table(m, n, lambda m, s: 0), "with 3 stages and 4 micro-batches, it takes "),
        (lambda m, n: table(m, n, lambda m, s: m - 1), "stage 1 keeps 3 micro-batches at once; 2 are enough"),
        (lambda m, n: [[work for work in order if work != "B1"] for order in table(m, n)], "of B0 to B3 once; it does F0 F1"),
        (lambda m, n: [["B0", "F0", *(w for w in order if w[1] != "0")] for order in table(m, n)], "none can go on"),
        (lambda m, n: table(m, n)[:-1], "a list for each stage is wanted: 3 lists"),
        (lambda m, n: None, "a list for each stage is wanted"),
        (lambda m, n: 1 / 0, "raised ZeroDivisionError"),
        (lambda m, n: table(m, n) if (m, n) == (3, 4) else gpipe(m, n), "with 2 stages and 4 micro-batches, stage 0 keeps 4"),
        (lambda m, n: tuple(iter(order) for order in table(m, n)), "[passed]"),
    ],
)  # fmt: skip
def test_one_f_one_b(capsys, write, complaint):
    checks.one_f_one_b(write)
    out = capsys.readouterr().out
    assert complaint in out, out


def test_an_endless_loop_is_told(capsys, hurried):
    checks.one_f_one_b(for_ever)
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
        (lambda mine: exchange(mine, lambda rank: rank == 1), "[passed]"),
        (lambda mine: exchange(mine, lambda rank: True, dist.isend), "both ranks send first, and NCCL would hang"),
        (lambda mine: exchange(mine, lambda rank: False), "[not yet] both ranks receive first, and NCCL would hang: rank 0 receives"),
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


def waits_for_one_that_loops(mine):
    """Rank 1 sends nothing, and does not end."""
    if dist.get_rank():
        for_ever(mine)
    dist.recv(torch.empty_like(mine), src=1)


@pytest.mark.parametrize(
    "worker, places",
    [(waits_for_one_that_loops, ("recv and rank 1", "in for_ever")), (for_ever, ("in for_ever", "in for_ever and"))],
)
def test_an_exchange_that_waits_for_ever_is_told(capsys, hurried, worker, places):
    """And where: the call of torch.distributed, not the virtual GPUs' part of it."""
    checks.exchanged(worker)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after 3 seconds rank 0") and "who sends first?" in out, out
    assert all(place in out for place in places), out
