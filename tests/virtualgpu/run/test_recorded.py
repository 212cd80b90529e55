"""A step on several ranks, recorded in a dry run."""

import pytest
import torch
import torch.distributed as dist

import virtualgpu
from virtualgpu.run.ranks.recorded import record


def averaged(elements):
    """A step in which each rank computes, and the ranks add up what they have."""
    x = torch.ones(elements, elements, device="cuda")

    def step():
        dist.all_reduce(x @ x)

    return step


def test_each_job_has_its_step_and_its_peak():
    virtualgpu.reset()
    runs = record(averaged, [(512,), (2048,)], nprocs=2)
    small, large = runs[512,], runs[2048,]
    assert list(small.timeline.rows) == ["rank 0", "rank 1"] and small.timeline.origin == "simulated"
    assert {span.kind for span in small.timeline.rows["rank 0"]} >= {"forward", "communication"}
    assert 0 < small.seconds < large.seconds and 0 < large.idle < 100
    assert large.peaks == [peak + 2 * (2048**2 - 512**2) * 4 for peak in small.peaks]  # x, and what is added up
    assert virtualgpu.machine() is None


def unequal_first_steps():
    """Ranks that meet in no collective, and whose first steps take unequally long."""
    a = torch.empty(4096, 4096, device="cuda")
    return lambda: [a @ a for _ in range(3 if dist.get_rank() == 0 else 1)]


def test_all_ranks_begin_the_recorded_step_at_one_moment():
    """Also where the first step, which is not recorded, ended at another moment on each."""
    rows = record(unequal_first_steps, [()], nprocs=2)[()].timeline.rows
    assert [row[0].start for row in rows.values()] == pytest.approx([0, 0], abs=1e-4)


def test_the_gpus_that_were_on_are_back(gpus):
    x, before = torch.ones(2, device="cuda"), virtualgpu.machine()
    record(averaged, [(64,)], nprocs=3)
    assert virtualgpu.machine() is before and (x + 1).device == x.device
