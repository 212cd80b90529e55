"""The graders of notebook 03: a forward that keeps two GPUs busy, and two schedules on paper."""

import threading

import numpy as np
import pytest
import torch

import checks
import virtualgpu
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def home(outputs):
    return torch.cat(list(outputs)).to("cuda:0")


def comprehension(first, second, x, split_size):
    return home([second(first(part).to("cuda:1")) for part in x.split(split_size)])


def one_held_back(first, second, x, split_size):
    """The loop of PyTorch's tutorial."""
    splits, outputs = iter(x.split(split_size)), []
    before = first(next(splits)).to("cuda:1")
    for after in splits:
        outputs.append(second(before))
        before = first(after).to("cuda:1")
    return home([*outputs, second(before)])


def home_one_round_later(first, second, x, split_size):
    """Each output comes home, but only once cuda:0 has the next micro-batch in its queue."""
    splits, outputs = iter(x.split(split_size)), []
    before = first(next(splits)).to("cuda:1")
    for after in splits:
        halfway = first(after)
        outputs.append(second(before).to("cuda:0"))
        before = halfway.to("cuda:1")
    return torch.cat([*outputs, second(before).to("cuda:0")])


def generators(first, second, x, split_size):
    return home(map(second, (first(part).to("cuda:1") for part in x.split(split_size))))


def one_buffer(first, second, x, split_size):
    """Places instead of a list."""
    parts = []
    for start in range(0, len(x), split_size):
        parts += [second(first(x[start : start + split_size]).to("cuda:1", non_blocking=True))]
    return torch.vstack(parts).cuda(0)


def copy_streams(first, second, x, split_size):
    leave, arrive, outputs = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1"), []
    for part in x.split(split_size):
        halfway = first(part)
        leave.wait_stream(torch.cuda.current_stream("cuda:0"))
        with torch.cuda.stream(leave), torch.cuda.stream(arrive):
            arrived = halfway.to("cuda:1", non_blocking=True)
        torch.cuda.current_stream("cuda:1").wait_stream(arrive)
        outputs.append(second(arrived))
    return home(outputs)


def a_thread(first, second, x, split_size):
    """Another thread queues; it ends before the result is read."""
    outputs = []
    work = threading.Thread(target=lambda: outputs.append(comprehension(first, second, x, split_size)))
    work.start()
    work.join()
    return outputs[0]


def next_copy_first(first, second, x, split_size):
    """Slower by a micro-batch, and still a pipeline."""
    splits, outputs = iter(x.split(split_size)), []
    before = first(next(splits)).to("cuda:1")
    for part in splits:
        after = first(part).to("cuda:1")
        outputs.append(second(before))
        before = after
    return home([*outputs, second(before)])


def in_turns(first, second, x, split_size):
    return second(first(x).to("cuda:1")).to("cuda:0")


def split_late(first, second, x, split_size):
    return home([second(part) for part in first(x).to("cuda:1").split(split_size)])


def home_each_round(first, second, x, split_size):
    return torch.cat([second(first(part).to("cuda:1")).to("cuda:0") for part in x.split(split_size)])


def all_of_first(first, second, x, split_size):
    halfway = [first(part).to("cuda:1") for part in x.split(split_size)]
    return home([second(part) for part in halfway])


def copied_in_one(first, second, x, split_size):
    halfway = torch.cat([first(part) for part in x.split(split_size)]).to("cuda:1")
    return home([second(part) for part in halfway.split(split_size)])


def reads(first, second, x, split_size):
    outputs, largest = [], 0.0
    for part in x.split(split_size):
        outputs.append(second(first(part).to("cuda:1")))
        largest = max(largest, outputs[-1].detach().max().item())
    return home(outputs)


def synchronizes(first, second, x, split_size):
    outputs = []
    for part in x.split(split_size):
        outputs.append(second(first(part).to("cuda:1")))
        torch.cuda.synchronize("cuda:1")
    return home(outputs)


@pytest.mark.parametrize(
    "forward, said",
    [
        (in_turns, "a step takes 4 ... first gets all 120 images at once"),
        (split_late, "first gets all 120 images at once"),
        (home_each_round, "one in turns 4 ... which copy in your loop has to wait for second?"),
        (all_of_first, "all of first is queued before any of second"),
        (copied_in_one, "all of first is queued before any of second"),
        (reads, "each round waits until cuda:1 is done (.item(), print, synchronize?)"),
        (synchronizes, "each round waits until cuda:1 is done"),
        (lambda first, second, x, size: comprehension(first, second, x, size).to("cuda:1"), "the result is on cuda:1; the labels wait on cuda:0"),
        (lambda first, second, x, size: comprehension(first, second, x, 20), "with split_size=40, first gets 20 images at once"),
        (lambda first, second, x, size: comprehension(first, second, x, size).detach(), "the gradients are not one GPU's"),
        (lambda first, second, x, size: comprehension(first, second, x, size).flip(0), "does each row come out in its place?"),
        (lambda first, second, x, size: home([second(first(x[i * size : (i + 1) * size]).to("cuda:1")) for i in range(len(x) // size)]),
         "with 10 rows and split_size=4, the result has the shape (8, 3), not (10, 3)"),
        (lambda first, second, x, size: [second(first(part).to("cuda:1")) for part in x.split(size)], "it returns list; one tensor is wanted"),
        (lambda first, second, x, size: None, "it returns NoneType"),
        (lambda first, second, x, size: second(first(x)), "your code raised RuntimeError: Expected all tensors to be on the same device"),
        (no_end, "after 60 seconds rank 0 stands in ... in no_end ... does your loop end?"),
        (comprehension, "[passed]"),
        (one_held_back, "[passed]"),
        (home_one_round_later, "[passed]"),
        (generators, "[passed]"),
        (one_buffer, "[passed]"),
        (copy_streams, "[passed]"),
        (a_thread, "[passed]"),
        (next_copy_first, "[passed]"),
    ],
)  # fmt: skip
def test_keeps_both_busy(says, forward, said):
    says(said, checks.keeps_both_busy, forward)


def test_other_gpus_of_the_notebook_do_not_matter(says):
    """It measures on T4s of its own, and the notebook's are there afterwards."""
    with virtualgpu.gpus(4, like="A100"):
        says("[passed]", checks.keeps_both_busy, comprehension)
        says("one in turns 406: first gets all 120", checks.keeps_both_busy, in_turns)
        assert torch.cuda.get_device_name(3).startswith("NVIDIA A100")


def gpipe(stages, pieces, last_first=True):
    order = range(pieces)[::-1] if last_first else range(pieces)
    rows = []
    for s in range(stages):
        before, after = [None] * s, [None] * (stages - 1 - s)
        forward, backward = [f"F{i}" for i in range(pieces)], [f"B{i}" for i in order]
        rows.append([*before, *forward, *after, *after, *backward, *before])
    return rows


def one_f_one_b(stages, pieces):
    """Each stage begins backward as soon as it can."""
    rows, done = [[] for _ in range(stages)], [{} for _ in range(stages)]
    for slot in range(2 * (pieces + stages - 1)):
        for s, row in enumerate(rows):
            forward, backward = (sum(work.startswith(way) for work in done[s]) for way in "FB")
            may_back = backward < forward and (s == stages - 1 or done[s + 1].get(f"B{backward}", slot) < slot)
            may_go = forward < pieces and forward - backward < stages - s
            may_go = may_go and (s == 0 or done[s - 1].get(f"F{forward}", slot) < slot)
            work = f"B{backward}" if may_back else f"F{forward}" if may_go else None
            row.append(work)
            if work:
                done[s][work] = slot
    return rows


def swapped(rows, one, other):
    exchange = {one: other, other: one}
    return [[exchange.get(work, work) for work in row] for row in rows]


def one_at_a_time(p, m):
    """Holds little, and is no pipeline."""
    rows = [[None] * (2 * m * p) for _ in range(p)]
    for s in range(p):
        for i in range(m):
            rows[s][2 * p * i + s], rows[s][2 * p * (i + 1) - 1 - s] = f"F{i}", f"B{i}"
    return rows


def in_closed_form(p, m):
    rows = [[None] * (2 * (m + p - 1)) for _ in range(p)]
    for s in range(p):
        for i in range(m):
            rows[s][s + (i if i < p - s else 2 * i)] = f"F{i}"
            rows[s][2 * p - 1 - s + 2 * i] = f"B{i}"
    return rows


@pytest.mark.parametrize(
    "table, said",
    [
        (lambda m, n: [[*row, None] for row in gpipe(m, n)], "gpipe, 2 stages and 4 micro-batches: each stage waits 3 of 11 slots; it need not wait more than 2"),
        (lambda m, n: [[f"F{i}" for i in range(n)] + [f"B{i}" for i in range(n)] for _ in range(m)], "stage 1 begins F0 in slot 0, before stage 0 has finished it"),
        (lambda m, n: [[work and work.replace("B", "F") for work in row] for row in gpipe(m, n)], "stage 0 should have each of F0 to F3 once"),
        (lambda m, n: [[work if work and work[0] == "F" else None for work in row] for row in gpipe(m, n)], "stage 0 should have each of B0 to B3 once"),
        # forwards right, backward in the direction of forward
        (lambda m, n: [[None] * s + [f"F{i}" for i in range(n)] + [None] * (m - 1) + [f"B{i}" for i in range(n)] + [None] * (m - 1 - s) for s in range(m)],
         "stage 0 begins B0 in slot 5, before stage 1 has finished it"),
        (lambda m, n: swapped(gpipe(m, n), "F3", "B3"), ", before its own F3"),
        (lambda m, n: gpipe(m, n)[:-1], "there should be 2 rows of one length"),
        (lambda m, n: 1 / 0, "rank 0 raised ZeroDivisionError: division by zero (in gpipe)"),
        (lambda m, n: gpipe(m, n) if (m, n) in ((2, 4), (3, 4), (4, 8)) else [], "there should be 5 rows"),
        (lambda m, n: gpipe(m, n) if n >= m else gpipe(m, m), "gpipe, 5 stages and 2 micro-batches: stage 0 should have"),
        (lambda m, n: [["." if work is None else work for work in row] for row in gpipe(m, n)], "something besides F, B and None"),
        (lambda m, n: [[None if work is None else int(work[1:]) for work in row] for row in gpipe(m, n)], "stage 0 should have each of F0 to F3 once"),
        (lambda m, n: None, "it returns None; a list of rows is wanted"),
        (no_end, "after 20 seconds rank 0 stands in ... in no_end ... does your loop end? (in gpipe)"),
        (one_f_one_b, "a good schedule, but not GPipe: stage 0 begins B0 before F2"),
        (gpipe, "[passed]"),
        (lambda m, n: gpipe(m, n, last_first=False), "[passed]"),
        (lambda m, n: (iter(row) for row in gpipe(m, n)), "[passed]"),
        (lambda m, n: np.array(gpipe(m, n), dtype=object), "[passed]"),
        (lambda m, n: [[work and (work[0], int(work[1:])) for work in row] for row in gpipe(m, n)], "[passed]"),
    ],
)  # fmt: skip
def test_gpipe(says, table, said):
    says(said, checks.schedules, table, one_f_one_b)


@pytest.mark.parametrize(
    "table, said",
    [
        (gpipe, "one_f_one_b, 2 stages and 4 micro-batches: stage 0 holds 4 micro-batches at once; in 1F1B at most 2"),
        (lambda p, m: gpipe(p, m) if m > 4 else one_f_one_b(p, m), "one_f_one_b, 4 stages and 8 micro-batches: stage 0 holds 8"),
        (one_at_a_time, "one_f_one_b, 2 stages and 4 micro-batches: each stage waits 8 of 16 slots; it need not wait more than 2"),
        (lambda p, m: one_f_one_b(p, m)[::-1], "before stage 0 has finished it"),
        (lambda p, m: None, "one_f_one_b, 2 stages and 4 micro-batches: it returns None"),
        (no_end, "after 20 seconds ... does your loop end? (in one_f_one_b)"),
        (one_f_one_b, "[passed]"),
        (in_closed_form, "[passed]"),
        (lambda p, m: tuple(map(tuple, in_closed_form(p, m))), "[passed]"),
    ],
)  # fmt: skip
def test_one_f_one_b(says, table, said):
    says(said, checks.schedules, gpipe, table)
