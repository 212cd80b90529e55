"""The graders of notebook 11: 1F1B's table, and an exchange that must not wait for ever."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import checks
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


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


def greedy(stages, number):
    """What can be done next is done, backward first, and no stage runs further ahead than to the end and back."""
    orders, done = [[] for _ in range(stages)], set()
    while any(len(order) < 2 * number for order in orders):
        now = []
        for stage, order in enumerate(orders):
            forward, backward = (sum(work[0] == kind for work in order) for kind in "FB")
            last = stage == stages - 1
            if backward < forward and (last or (stage + 1, f"B{backward}") in done):
                now.append((stage, f"B{backward}"))
            elif (
                forward < number
                and forward - backward < stages - stage
                and (not stage or (stage - 1, f"F{forward}") in done)
            ):
                now.append((stage, f"F{forward}"))
        for stage, work in now:
            orders[stage].append(work)
        done.update(now)
    return orders


@pytest.mark.parametrize(
    "write, said",
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
        (no_end, "after 20 seconds ... in no_end ... does your loop end?"),
        (table, "[passed]"),
        (lambda m, n: tuple(iter(order) for order in table(m, n)), "[passed]"),
        (greedy, "[passed]"),
        (lambda m, n: np.array(table(m, n)), "[passed]"),
    ],
)  # fmt: skip
def test_one_f_one_b(says, write, said):
    says(said, checks.one_f_one_b, write)


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


def receives_asking_first(mine):
    """One after the other in a stream: the message that was asked for first is waited for."""
    theirs, other = torch.empty_like(mine), 1 - dist.get_rank()
    coming = dist.irecv(theirs, src=other)
    dist.send(mine, dst=other)
    coming.wait()
    return theirs


def gathered(mine):
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return both[1 - dist.get_rank()]


def told_to_all(mine):
    both = [mine.clone() for _ in range(2)]
    for rank, numbers in enumerate(both):
        dist.broadcast(numbers, src=rank)
    return both[1 - dist.get_rank()]


def waits_for_one_that_loops(mine):
    """Rank 1 sends nothing, and does not end."""
    if dist.get_rank():
        no_end()
    dist.recv(torch.empty_like(mine), src=1)


@pytest.mark.parametrize(
    "exchange, said",
    [
        (lambda mine: exchange(mine, lambda rank: True, dist.isend), "both ranks send first, and NCCL would hang"),
        (lambda mine: exchange(mine, lambda rank: False), "[not yet] both ranks receive first, and NCCL would hang: rank 0 receives"),
        (receives_asking_first, "NCCL would hang"),
        (lambda mine: torch.full_like(mine, 1.0 - dist.get_rank()), "rank 0 returns other numbers than those that were sent"),
        (lambda mine: mine, "rank 0 returns its own numbers"),
        (lambda mine: at_once(mine) / undefined, "raised NameError: name 'undefined'"),  # noqa: F821
        (lambda mine: None, "raised AttributeError"),
        (no_end, "after 3 seconds rank 0 ... in no_end and ... in no_end: who sends first?"),
        # where: the call of torch.distributed, not the virtual GPUs' part of it
        (waits_for_one_that_loops, "after 3 seconds rank 0 ... recv and rank 1 ... in no_end: who sends first?"),
        (at_once, "[passed]"),
        (lambda mine: exchange(mine, lambda rank: rank == 1), "[passed]"),
        (gathered, "[passed]"),
        (told_to_all, "[passed]"),
    ],
)  # fmt: skip
def test_exchanged(says, exchange, said):
    says(said, checks.exchanged, exchange)
