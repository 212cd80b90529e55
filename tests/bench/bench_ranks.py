"""What launching ranks costs, and how much of the ideal speed-up two processes reach: a pipeline, and DDP where computing dominates and where
it does not."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.bench.tools import Row
from virtualgpu.run.ranks import launch

PIECES = 4
IDEAL = 2 * PIECES / (PIECES + 1)


def rows() -> list[Row]:
    first, further = timed_launch(), statistics.median(timed_launch() for _ in range(10))
    shares = {}
    for name, make in (("layers that sleep", sleeping), ("real compute", computing)):
        pairs = [launch(unsplit, make, nprocs=1)[0] / max(launch(pipelined, make)) for _ in range(5)]  # in turn
        shares[name] = 100 * statistics.median(pairs) / IDEAL
    return [
        Row("launch: first call", first, "s", "< 5 s", first < 5),
        Row("launch: further calls", further, "s", "< 0.5 s", further < 0.5),
        *(
            Row(f"pipeline of 2 processes, {name}: of the ideal speed-up", share, "%", "> 85 %", share > 85)
            for name, share in shares.items()
        ),
        *ddp(),
    ]


def ddp() -> list[Row]:
    found = []
    for name, make, target in (("large layers", large, 85), ("tiny layers", tiny, None)):
        pairs = [sum(launch(throughput, make)) / launch(throughput, make, nprocs=1)[0] for _ in range(5)]  # in turn
        share = 100 * statistics.median(pairs) / 2
        said = f"> {target} %" if target else "no target"
        found.append(Row(f"DDP of 2 processes, {name}: of twice the speed", share, "%", said, share > (target or 0)))
    return found


def timed_launch() -> float:
    start = time.perf_counter()
    launch(dist.get_rank)
    return time.perf_counter() - start


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.0005 * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.001 * len(gradient))
        return gradient


class SlowLayer(nn.Linear):
    def forward(self, x):
        return Sleep.apply(super().forward(x))


def sleeping():
    return nn.Sequential(*[SlowLayer(8, 8) for _ in range(8)]), torch.randn(64, 8)


def computing():
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]), torch.randn(1024, 1024)


def unsplit(make) -> float:
    model, x = make()
    return fastest(lambda: nn.functional.mse_loss(model(x), x).backward())


def pipelined(make) -> float:
    model, x = make()
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


def large():
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]), torch.randn(2048, 512)


def tiny():
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(20)]), torch.randn(16, 16)


def throughput(make) -> float:
    """Training steps a second on this rank, the best of three trials."""
    model, x = make()
    ddp, best = DistributedDataParallel(model), 0.0
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            ddp(x).square().mean().backward()
        best = max(best, 5 / (time.perf_counter() - start))
    return best
