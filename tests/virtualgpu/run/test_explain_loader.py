"""A loader's workers on the simulated clock: they load beside the step, as many batches ahead as PyTorch asks for."""

import itertools

import pytest

from virtualgpu.run.explain.loader import _Workers


def run(workers, ahead, a_batch, step, steps=40):
    """When each step has ended, of a host that waits for a batch and then works on it."""
    queue, now, ends = _Workers(workers, ahead, 0.0), 0.0, []
    for _ in range(steps):
        now = max(now, queue.ready(now, a_batch)) + step
        ends.append(now)
    return ends


@pytest.mark.parametrize("workers, a_batch", [(1, 0.02), (2, 0.04), (8, 0.16)])
def test_slow_workers_set_the_pace(workers, a_batch):
    ends = run(workers, 2 * workers, a_batch, step=0.01)
    assert ends[0] == pytest.approx(a_batch * (1 + 1 / workers) + 0.01, rel=0.5)
    assert [end - start for start, end in itertools.pairwise(ends[2:])] == pytest.approx([0.02] * 37)


def test_workers_that_keep_up_cost_nothing_after_the_first_batch():
    ends = run(2, 4, 0.03, step=0.02)
    assert ends[-1] - ends[0] == pytest.approx(39 * 0.02)


def test_no_batch_is_loaded_before_it_is_asked_for():
    """Of one batch ahead, a worker begins with the next when this one is taken: it cannot be there sooner than that."""
    queue = _Workers(4, 1, 0.0)
    first = queue.ready(0.0, 1.0)
    assert queue.ready(first + 5.0, 1.0) == pytest.approx(first + 1.0)
