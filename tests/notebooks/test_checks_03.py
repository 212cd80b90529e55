"""The graders of notebook 03: a forward that keeps two GPUs busy, and two schedules on paper."""

import numpy as np
import torch

import checks
import virtualgpu
from tests.notebooks.answers import PASSED, solution, table
from tests.processes import no_end


def one_held_back(first, second, x, split_size):
    """The loop of PyTorch's tutorial."""
    splits, outputs = iter(x.split(split_size)), []
    before = first(next(splits)).to("cuda:1")
    for after in splits:
        outputs.append(second(before))
        before = first(after).to("cuda:1")
    return torch.cat([*outputs, second(before)]).to("cuda:0")


def copy_streams(first, second, x, split_size):
    leave, arrive, outputs = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1"), []
    for part in x.split(split_size):
        halfway = first(part)
        leave.wait_stream(torch.cuda.current_stream("cuda:0"))
        with torch.cuda.stream(leave), torch.cuda.stream(arrive):
            arrived = halfway.to("cuda:1", non_blocking=True)
        torch.cuda.current_stream("cuda:1").wait_stream(arrive)
        outputs.append(second(arrived))
    return torch.cat(outputs).to("cuda:0")


def next_copy_first(first, second, x, split_size):
    """Slower by a micro-batch, and still a pipeline."""
    splits, outputs = iter(x.split(split_size)), []
    before = first(next(splits)).to("cuda:1")
    for part in splits:
        after = first(part).to("cuda:1")
        outputs.append(second(before))
        before = after
    return torch.cat([*outputs, second(before)]).to("cuda:0")


LOOP = '[second(first(micro_batch).to("cuda:1")) for micro_batch in x.split(split_size)]'
HOME = '.to("cuda:0")'
IN_TURNS = LOOP, '[second(first(x).to("cuda:1"))]'
EACH = '[y for part in x.split(split_size) if (y := second(first(part).to("cuda:1"))) is not None and ({} or True)]'

test_keeps_both_busy = table(checks.keeps_both_busy, "03", "forward", [
    (IN_TURNS, "a step takes 4 ... first gets all 120 images at once"),
    (('.to("cuda:1"))', f'.to("cuda:1")){HOME}'), "one in turns 4 ... which copy in your loop has to wait for second?"),
    ((LOOP, '[second(part) for part in [first(part).to("cuda:1") for part in x.split(split_size)]]'), "all of first is queued before any of second"),
    ((LOOP, EACH.format("y.detach().max().item()")), "each round waits until cuda:1 is done (.item(), print, synchronize?)"),
    ((HOME, ""), "the result is on cuda:1; the labels wait on cuda:0"),
    (("split(split_size)", "split(20)"), "with split_size=40, first gets 20 images at once"),
    ((HOME, HOME + ".detach()"), "the gradients are not one GPU's"),
    ((HOME, HOME + ".flip(0)"), "does each row come out in its place?"),
    ((LOOP, '[second(first(x[i * split_size : (i + 1) * split_size]).to("cuda:1")) for i in range(len(x) // split_size)]'),
     "with 10 rows and split_size=4, the result has the shape (8, 3), not (10, 3)"),
    (("torch.cat(outputs)" + HOME, "outputs"), "it returns list; one tensor is wanted"),
    (("(micro_batch)" + '.to("cuda:1")', "(micro_batch)"), "your code raised RuntimeError: Expected all tensors to be on the same device"),
    (no_end, "after 60 seconds rank 0 stands in ... in no_end ... does your loop end?"),
    (one_held_back, PASSED),
    (copy_streams, PASSED),
    (next_copy_first, PASSED),
])  # fmt: skip


def test_other_gpus_of_the_notebook_do_not_matter(says):
    """It measures on T4s of its own, and the notebook's are there afterwards."""
    with virtualgpu.gpus(4, like="A100"):
        says(PASSED, checks.keeps_both_busy, *solution("03", "forward"))
        assert torch.cuda.get_device_name(3).startswith("NVIDIA A100")


def instead(name: str, code: str) -> tuple[str, ...]:
    """Another function of that name, which may call the right one."""
    return f"def {name}(", "def right(", "def right(", f"def {name}(p, m):\n    {code}\n\n\ndef right("


def each(work: str) -> tuple[str, ...]:
    return instead("gpipe", f"return [[{work} for work in row] for row in right(p, m)]")


FORWARD, BACKWARD = 'rows[s][s + i] = f"F{i}"', 'rows[s][m + 2 * (p - 1) - s + i] = f"B{i}"'

test_schedules = table(checks.schedules, "03", "gpipe one_f_one_b", [
    (instead("gpipe", "return [[*row, None] for row in right(p, m)]"),
     "gpipe, 2 stages and 4 micro-batches: each stage waits 3 of 11 slots; it need not wait more than 2"),
    ((FORWARD, 'rows[s][i] = f"F{i}"'), "stage 1 begins F0 in slot 0, before stage 0 has finished it"),
    ((BACKWARD, BACKWARD.replace('"B', '"F')), "stage 0 should have each of F0 to F3 once"),
    ((BACKWARD, "pass"), "stage 0 should have each of B0 to B3 once"),
    (("m + 2 * (p - 1) - s + i", "m + p - 1 + s + i"), "stage 0 begins B0 in slot 5, before stage 1 has finished it"),  # in forward's direction
    (each('{"F3": "B3", "B3": "F3"}.get(work, work)'), ", before its own F3"),
    (instead("gpipe", "return right(p, m)[:-1]"), "there should be 2 rows of one length"),
    (instead("gpipe", "return right(p, max(m, p))"), "gpipe, 5 stages and 2 micro-batches: stage 0 should have"),
    (each('work or "."'), "something besides F, B and None"),
    (instead("gpipe", "return None"), "it returns None; a list of rows is wanted"),
    (instead("gpipe", "while True: pass"), "after 20 seconds rank 0 stands in ... does your loop end? (in gpipe)"),
    (instead("gpipe", "return one_f_one_b(p, m)"), "a good schedule, but not GPipe: stage 0 begins B0 before F2"),
    (instead("one_f_one_b", "return gpipe(p, m)"), "one_f_one_b, 2 stages and 4 micro-batches: stage 0 holds 4 micro-batches at once; in 1F1B at most 2"),
    ((BACKWARD, BACKWARD.replace("B{i}", "B{m - 1 - i}")), PASSED),  # the last first
    (instead("gpipe", "return np.array(right(p, m), dtype=object)"), PASSED),
    (each("work and (work[0], int(work[1:]))"), PASSED),
    (instead("one_f_one_b", "return map(iter, right(p, m))"), PASSED),
], np=np)  # fmt: skip
