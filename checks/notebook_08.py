"""The graders of notebook 08: DDP in the wild."""

from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from checks.grader import grader, launched, launched_on_gpus
from checks.notebook_04 import RANKS, draw, on_own_gpu, own_batches, small_model

CASES = [
    (length, world_size, rank) for length, world_size in ((8, 2), (10, 4), (7, 3), (2, 5)) for rank in range(world_size)
]


@grader
def shards(shard: Callable[[int, int, int], list[int]]) -> str | None:
    """shard(length, rank, world_size) as DistributedSampler(shuffle=False) deals samples out, without asking it."""
    found = launched(_dealt, shard, ask="does your loop end?")
    if isinstance(found, str):
        return found
    for (length, world_size, rank), got in zip(CASES, found[0], strict=True):
        right = list(DistributedSampler(range(length), num_replicas=world_size, rank=rank, shuffle=False))
        if got != right:
            return f"{length} samples, rank {rank} of {world_size}: it gives {got}, DistributedSampler {right}"
    return None


@grader
def stays_together(train: Callable[[nn.Module, list], None]) -> str | None:
    """train(model, batches) in three processes leaves the same weights on all, and those of DDP."""
    found = launched_on_gpus(_weights_after, train, draw(), nprocs=RANKS)
    if isinstance(found, str):
        return found
    (first, right), *others = found
    apart = max(float((a - b).abs().max()) for other, _ in others for a, b in zip(first, other, strict=True))
    if apart > 1e-6:
        far = "more than 0.01" if apart > 0.01 else f"{apart:.0e}"  # the batches are drawn anew each time
        return f"after 20 steps the weights of the ranks differ by {far}: who averages the gradients?"
    if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, right, strict=True)):
        return (
            "the ranks agree with each other, but not with DDP on the same batches: were all batches used, once each?"
        )
    return None


def _dealt(shard: Callable) -> list[list[int]]:
    """What it gives for each of CASES."""
    refusal = RuntimeError("that is DistributedSampler itself: deal the samples yourself")
    with mock.patch.object(DistributedSampler, "__init__", side_effect=refusal):
        return [list(shard(length, rank, world_size)) for length, world_size, rank in CASES]


def _weights_after(train: Callable, seed: int) -> tuple[list, list]:
    on_own_gpu()
    model, wrapped = small_model(seed), DistributedDataParallel(small_model(seed))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for x, y in own_batches(20, seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    train(model, own_batches(20, seed))
    return [[p.detach().cpu() for p in network.parameters()] for network in (model, wrapped)]
