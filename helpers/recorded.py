"""One training step on each of several GPUs, recorded in a dry run: what kinds of parallel training are compared by."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import virtualgpu
from helpers.timeline import Timeline, computing
from virtualgpu.run.ranks import launch


@dataclass
class Recorded:
    """timeline: a row a rank, simulated. peaks: bytes allocated at most, by rank, in that step."""

    timeline: Timeline
    peaks: list[int]

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def idle(self) -> float:
        """Percent of the time in which a GPU computes nothing, all GPUs together."""
        rows = self.timeline.rows.values()
        return 100 * (1 - sum(map(computing, rows)) / (len(rows) * self.seconds))


def record(build: Callable[..., Callable[[], object]], jobs: Iterable[tuple], nprocs: int) -> dict[tuple, Recorded]:
    """build(*job), called on each rank with its own GPU current, returns a step; of its second call all is recorded.

    Virtual T4s, also where there are real GPUs; those that are on before are put away.
    """
    if virtualgpu.machine():
        virtualgpu.reset()
    jobs = list(jobs)
    with virtualgpu.dry_run(nprocs):
        ranks = launch(_on_rank, build, jobs, nprocs=nprocs, timeout=600)
    runs = {}
    for job, recorded in zip(jobs, zip(*ranks, strict=True), strict=True):
        spans, peaks = zip(*recorded, strict=True)
        runs[job] = Recorded(Timeline.of_ranks(spans, origin="simulated"), list(peaks))
    return runs


def _on_rank(build: Callable, jobs: list[tuple]) -> list[tuple[list, int]]:
    torch.cuda.set_device(dist.get_rank())
    return [_one(build, job) for job in jobs]


def _one(build: Callable, job: tuple) -> tuple[list, int]:
    step = build(*job)
    step()  # the first one has beginnings of its own: shapes are told, buffers are made
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    with virtualgpu.recording() as spans:
        step()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del step
    gc.collect()  # nothing of it stays on the GPU for the next
    return list(spans), peak
