"""How much of twice the speed two DDP processes reach, where computing dominates and where it does not."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bench.row import Row
from virtualgpu.run.ranks import launch


def rows() -> list[Row]:
    found = []
    for name, make, target in (("large layers", large, 85), ("tiny layers", tiny, None)):
        pairs = [sum(launch(throughput, make)) / launch(throughput, make, nprocs=1)[0] for _ in range(5)]  # in turn
        share = 100 * statistics.median(pairs) / 2
        said = f"> {target} %" if target else "no target"
        found.append(Row(f"DDP of 2 processes, {name}: of twice the speed", share, "%", said, share > (target or 0)))
    return found


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
