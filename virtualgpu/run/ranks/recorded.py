"""One training step on each of several virtual GPUs, recorded in a dry run: what kinds of parallel training are compared by."""

import gc
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from virtualgpu import session
from virtualgpu.run.ranks import launch
from virtualgpu.session import blocks
from virtualgpu.timeline import Timeline
from virtualgpu.timing.trace import Span


class Recorded(NamedTuple):
    """timeline: a row a rank, simulated. peaks: bytes allocated at most, by rank, in that step."""

    timeline: Timeline
    peaks: list[int]

    @property
    def seconds(self) -> float:
        """How long the step took, of the first rank that began to the last that ended."""
        return self.timeline.seconds

    @property
    def idle(self) -> float:
        """Percent of the time in which a GPU computes nothing, all GPUs together."""
        return self.timeline.idle


def record(build: Callable[..., Callable[[], object]], jobs: Iterable[tuple], nprocs: int) -> dict[tuple, Recorded]:
    """``build(*job)``, called on each rank with its own GPU current, returns a step; of its second call all is recorded.

    Virtual T4s, also where there are real GPUs; those that are on before wait, and are back afterwards. Raises WorkerError where a rank
    fails, or all jobs together take more than ten minutes.
    """
    jobs = list(jobs)
    with session.suspended(), blocks.dry_run(nprocs):
        ranks = launch(_on_rank, build, jobs, nprocs=nprocs, timeout=600)
    runs = {}
    for job, recorded in zip(jobs, zip(*ranks, strict=True), strict=True):
        spans, peaks = zip(*recorded, strict=True)
        runs[job] = Recorded(Timeline.of_ranks(spans, origin="simulated"), list(peaks))
    return runs


def _on_rank(build: Callable, jobs: list[tuple]) -> list[tuple[list[Span], int]]:
    torch.cuda.set_device(dist.get_rank())
    return [_one(build, job) for job in jobs]


def _one(build: Callable, job: tuple) -> tuple[list[Span], int]:
    step = build(*job)
    step()  # the first one has beginnings of its own: shapes are told, buffers are made
    # a barrier would be gloo's where no rank has used its GPU in the group of all, and leave the clocks apart
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with blocks.recording() as spans:
        step()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del step
    gc.collect()  # nothing of it stays on the GPU for the next
    return list(spans), peak
