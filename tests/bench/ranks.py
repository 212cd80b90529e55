"""What launching ranks costs, and how much of the ideal speed-up two processes reach: a pipeline, and DDP."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.bench.tools import Row, below
from virtualgpu.run.ranks import launch

PIECES = 4
IDEAL = 2 * PIECES / (PIECES + 1)


def rows() -> list[Row]:
    first, further = timed_launch(), statistics.median(timed_launch() for _ in range(10))
    pipelines = [launch(unsplit, nprocs=1)[0] / max(launch(pipelined)) for _ in range(5)]  # in turn
    replicas = [sum(launch(throughput)) / launch(throughput, nprocs=1)[0] for _ in range(5)]
    return [
        below("launch: first call", first, "s", 5),
        below("launch: further calls", further, "s", 0.5),
        _share("pipeline of 2 processes: of the ideal speed-up", pipelines, IDEAL),
        _share("DDP of 2 processes: of twice the speed", replicas, 2),
    ]


def _share(what: str, faster: list[float], ideal: float) -> Row:
    share = 100 * statistics.median(faster) / ideal
    return Row(what, share, "%", "> 85 %", share > 85)


def timed_launch() -> float:
    start = time.perf_counter()
    launch(dist.get_rank)
    return time.perf_counter() - start


def layers(number: int, width: int, rows: int) -> tuple[nn.Sequential, torch.Tensor]:
    """And their input."""
    made = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(number)]
    return nn.Sequential(*made), torch.randn(rows, width)


def unsplit() -> float:
    model, x = layers(8, 1024, 1024)
    return fastest(lambda: nn.functional.mse_loss(model(x), x).backward())


def pipelined() -> float:
    model, x = layers(8, 1024, 1024)
    rank = dist.get_rank()
    stage = PipelineStage(model[4 * rank :][:4], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PIECES, loss_fn=nn.functional.mse_loss)
    return fastest(lambda: schedule.step(x) if rank == 0 else schedule.step(target=x, losses=[]))


def fastest(work) -> float:
    times = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def throughput() -> float:
    """Training steps a second on this rank, the best of three trials."""
    model, x = layers(4, 512, 2048)
    ddp, best = DistributedDataParallel(model), 0.0
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            ddp(x).square().mean().backward()
        best = max(best, 5 / (time.perf_counter() - start))
    return best
