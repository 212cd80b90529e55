"""The graders of notebook 04: DataParallel and DDP."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from checks.grader import grader, launched


@grader
def shards(shard: Callable[[int, int, int], list[int]]) -> str | None:
    """shard(length, rank, world_size) as DistributedSampler(shuffle=False) deals samples out."""
    for length, world_size in ((8, 2), (10, 4), (7, 3), (2, 5)):
        for rank in range(world_size):
            sampler = DistributedSampler(range(length), num_replicas=world_size, rank=rank, shuffle=False)
            if list(shard(length, rank, world_size)) != list(sampler):
                got, here = list(shard(length, rank, world_size)), f"{length} samples, rank {rank} of {world_size}"
                return f"{here}: it gives {got}, DistributedSampler {list(sampler)}"
    return None


@grader
def averages(average_gradients: Callable[[nn.Module], None]) -> str | None:
    """After average_gradients(model) in each of two processes, the gradients are DDP's."""
    found = launched(_gradients_both_ways, average_gradients)
    if isinstance(found, str):
        return found
    for rank, (own, by_ddp) in enumerate(found):
        for mine, theirs in zip(own, by_ddp, strict=True):
            if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
                ratio = float(mine.norm() / theirs.norm())
                return f"on rank {rank} a gradient is {ratio:.2f} times as long as DDP's"
    return None


@grader
def stays_together(train: Callable[[nn.Module, list], None]) -> str | None:
    """train(model, batches) in two processes leaves the same weights on both, and those of DDP."""
    found = launched(_weights_after, train)
    if isinstance(found, str):
        return found
    (first, right), (second, _) = found
    apart = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
    if apart > 1e-6:
        return f"after 20 steps the weights of the two ranks differ by up to {apart:.2f}: who averages the gradients?"
    if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, right, strict=True)):
        return (
            "the ranks agree with each other, but not with DDP on the same batches: were all batches used, once each?"
        )
    return None


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _own_batches(count: int) -> list:
    draw = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)]


def _gradients_both_ways(average_gradients: Callable) -> tuple[list, list]:
    ((x, y),) = _own_batches(1)
    model, wrapped = _small_model(), DistributedDataParallel(_small_model())
    for network in (model, wrapped):
        nn.functional.cross_entropy(network(x), y).backward()
    average_gradients(model)
    return [p.grad for p in model.parameters()], [p.grad for p in wrapped.parameters()]


def _weights_after(train: Callable) -> tuple[list, list]:
    model, wrapped = _small_model(), DistributedDataParallel(_small_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for x, y in _own_batches(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    train(model, _own_batches(20))
    return [[p.detach() for p in network.parameters()] for network in (model, wrapped)]
