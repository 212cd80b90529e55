"""The graders of notebook 06, out of memory: a rule for the riddle's curves, and the line that a stranger's snapshot accuses."""

import collections
import functools
import gc
import itertools
import random
import re

import numpy as np
import pytest
import torch

import checks
from checks import notebook_06
from checks.grader import NoRoom
from tests.processes import no_end

MIB = 1 << 20
RUNS = notebook_06._runs


pytestmark = pytest.mark.usefixtures("gpu")


@functools.cache
def drawn(state, each, device):
    draw = random.Random()
    draw.setstate(state)
    return RUNS(device, draw, each)


@pytest.fixture
def once(monkeypatch):
    """The grader's runs are the same each time, and take seconds: measured once for all answers."""
    monkeypatch.setattr(notebook_06, "_runs", lambda device, draw, each: drawn(draw.getstate(), each, device))


def steps_of(curve):
    return [after - before for before, after in itertools.pairwise(curve)]


def right(curve, output):
    steps = [after - before for before, after in itertools.pairwise(curve)]
    if min(steps) < -0.01:
        return "longer inputs"
    if sum(step > 0.01 for step in steps) == 1:
        return "optimizer state"
    return "outputs kept" if sum(steps) / len(steps) < 1.5 * output else "graph kept"


def by_median(curve, output):
    """As NumPy's words."""
    steps = np.diff(curve)
    ratio = np.median(steps) / output
    names = np.array(["graph kept", "outputs kept", "optimizer state", "longer inputs"])
    return names[3 if (steps < -0.01).any() else 2 if ratio < 0.1 else 1 if ratio < 1.5 else 0]


def by_the_ends(curve, output):
    if max(curve) > max(curve[-1], curve[0]) + 0.01 or curve != sorted(curve):
        return "longer inputs"
    if len({round(mib, 1) for mib in curve}) <= 3:
        return "optimizer state"
    return {True: "graph kept", False: "outputs kept"}[curve[-1] - curve[0] > 1.5 * 11 * output]


def by_size(curve, output):
    """What works for the four curves that the reader sees."""
    return right(curve, output) if max(curve) - min(curve) < 10 else "graph kept"


def test_the_riddles_curves_are_what_their_causes_say(gpu, once):
    runs = notebook_06._runs(gpu, random.Random(60), 4)
    assert torch.cuda.memory_allocated() == 0
    assert sorted(cause for cause, _, _ in runs) == sorted(4 * list(notebook_06.SITUATIONS))
    for cause, curve, output in runs:
        steps = steps_of(curve)
        assert len(curve) == 12
        if cause == "graph kept":
            assert min(steps[1:]) == pytest.approx(max(steps[1:]), abs=0.01) and min(steps) > 1.9 * output
        elif cause == "outputs kept":
            assert min(steps[1:]) == max(steps[1:]) == output
        elif cause == "optimizer state":
            assert max(steps) > 2 and sorted(steps)[-2] < 0.01 and min(steps) > -0.01
        else:
            assert min(steps) < -1


def test_the_riddle_shows_each_cause_once_and_the_same_each_time(gpu):
    curves, outputs = checks.riddle(gpu)
    assert (curves, outputs) == checks.riddle(gpu)
    assert sorted(right(curve, outputs[name]) for name, curve in curves.items()) == sorted(notebook_06.SITUATIONS)


@pytest.mark.parametrize("cause, said", [
    (lambda curve, output: "graph kept", "it is right about 4 of 16 runs. One that it wrongly calls 'graph kept': it starts at"),
    (by_size, "of 16 runs. One that it wrongly calls 'graph kept'"),
    (lambda curve, output: "a leak", "it returns 'a leak'; the names are ['graph kept', 'longer inputs', "),
    (lambda curve, output: curve[12], "your code raised IndexError: list index out of range"),
    (lambda curve, output: None, "it returns None"),
    (no_end, "after 20 seconds your code has not come to an end"),
    (right, "[passed]"),
    (by_median, "[passed]"),
    (lambda curve, output: right(np.array(curve), np.float32(output)), "[passed]"),
    (by_the_ends, "[passed]"),
])  # fmt: skip
def test_causes(gpu, once, says, cause, said):
    says(said, checks.causes, cause, gpu)


def test_a_table_of_answers_by_trial_does_not_pass(gpu, once, says):
    """What is wrong is said of one run, and never what it is: a reader who tries names in turn learns one run a try."""
    curves, outputs = checks.riddle(gpu)
    table = {tuple(curve): right(curve, outputs[name]) for name, curve in curves.items()}
    out = says("it is right about", checks.causes, lambda curve, output: table.get(tuple(curve), "graph kept"), gpu)
    named = int(re.search(r"it is right about (\d+) of 16", out)[1])
    assert named <= 8  # those that look like one of the four by chance, and each "graph kept"


def test_a_full_gpu_is_not_the_readers_fault(gpu, says, monkeypatch):
    """As when the cells ran in another order, and an error still keeps what it held."""
    held = [torch.zeros(1 << 20, dtype=torch.uint8, device=gpu) for _ in range(246)]
    out = says("MiB are taken before your code begins", checks.causes, right, gpu)
    assert "section 11" in out and "your code raised" not in out, out
    del held
    few = {name: notebook_06.SITUATIONS[name] for name in ("graph kept", "outputs kept")}  # the others take longer
    monkeypatch.setattr(notebook_06, "SITUATIONS", few)
    says("[passed]", checks.causes, right, gpu)


def test_the_riddle_says_who_holds_the_gpu(gpu):
    held = torch.zeros(246 << 20, dtype=torch.uint8, device=gpu)
    with pytest.raises(NoRoom, match=r"helpers.forget_error\(\)"):
        checks.riddle(gpu)
    del held


class Circle:
    """Nobody's any more, but gone only when Python looks."""

    def __init__(self, held):
        self.held, self.itself = held, self


def test_what_an_earlier_cell_left_does_not_go_in_the_middle_of_a_curve(gpu, monkeypatch):
    Circle(torch.zeros(32 * MIB, dtype=torch.uint8, device=gpu))
    garbage = iter([None])

    def run(device, draw):
        for _ in range(3):
            for _ in garbage:
                gc.collect()
            yield 0.0

    monkeypatch.setattr(notebook_06, "SITUATIONS", {"nothing": run})
    assert notebook_06._runs(gpu, random.Random(0), 1) == [("nothing", [0.0, 0.0, 0.0], 0.0)]


def blocks_of(snapshot):
    return [block for segment in snapshot["segments"] for block in segment["blocks"]]


def accused(snapshot, live=True, own=True, innermost=True, by_line=True):
    """The right answer; each idea can be left out."""
    held = collections.Counter()
    for block in blocks_of(snapshot):
        frames = [f for f in block["frames"] if not own or "site-packages" not in f["filename"]]
        if frames and (not live or block["state"] == "active_allocated"):
            frame = frames[0 if innermost else -1]
            place = frame["filename"], frame["line"]
            held[place] = held[place] + block["size"] if by_line else max(held[place], block["size"])
    return held.most_common(1)[0][0]


def by_sorting(snapshot):
    """As NumPy's numbers."""
    held = {}
    for block in blocks_of(snapshot):
        own = [(f["filename"], f["line"]) for f in block["frames"] if f["filename"] == "train.py"][:1]
        if block["state"] == "active_allocated" and own:
            held.setdefault(own[0], []).append(block["size"])
    name, line = sorted(held, key=lambda place: -sum(held[place]))[0]
    return np.str_(name), np.int64(line)


@pytest.mark.parametrize("culprit, said", [
    (lambda snapshot: accused(snapshot, by_line=False), "which does not hold most"),
    (lambda snapshot: accused(snapshot, live=False), "only what is `active_allocated`"),
    (lambda snapshot: accused(snapshot, own=False), "a line of an installed library"),
    (lambda snapshot: accused(snapshot, innermost=False), "the outermost frame"),
    (lambda snapshot: accused(snapshot)[1], "a pair of file name and line number is asked for"),
    (lambda snapshot: ("train.py", 49), "right about"),
    (lambda snapshot: blocks_of(snapshot)[0]["frames"][9], "your code raised IndexError"),
    (no_end, "after 20 seconds your code has not come to an end"),
    (accused, "[passed]"),
    (lambda snapshot: list(accused(snapshot)), "[passed]"),
    (by_sorting, "[passed]"),
    (lambda snapshot: collections.namedtuple("Place", "file line")(*accused(snapshot)), "[passed]"),
])  # fmt: skip
def test_culprits(says, culprit, said):
    says(said, checks.culprits, culprit)


def test_a_stranger_is_the_same_each_time():
    assert checks.stranger() == checks.stranger()
