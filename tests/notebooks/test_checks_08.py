"""The graders of notebook 08: samples dealt out to ranks, and a training that stays together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import checks

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def shard(length, rank, world_size):
    return [index % length for index in range(rank, -(-length // world_size) * world_size, world_size)]


def asks_the_sampler(length, rank, world_size):
    """A cheat."""
    return list(DistributedSampler(range(length), num_replicas=world_size, rank=rank, shuffle=False))


@pytest.mark.parametrize(
    "deal, complaint",
    [
        (shard, "[passed]"),
        (lambda length, rank, n: list(range(rank, length, n)), "10 samples, rank 2 of 4: it gives [2, 6]"),
        (lambda length, rank, n: list(range(length))[rank * length // n : (rank + 1) * length // n], "rank 0 of 2"),
        (lambda length, rank, n: None, "raised TypeError"),
        (asks_the_sampler, "that is DistributedSampler itself: deal the samples yourself"),
    ],
)
def test_shards(capsys, deal, complaint):
    checks.shards(deal)
    assert complaint in capsys.readouterr().out


def deals_for_ever(length, rank, world_size):
    while True:
        pass


def test_an_endless_deal_is_told(capsys, hurried):
    checks.shards(deals_for_ever)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after ") and "does your loop end?" in out, out


def train_with(call, batches_of=lambda batches: batches):
    def train(model, batches):
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for x, y in batches_of(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(call(model, ddp)(x), y).backward()
            optimizer.step()

    return train


def by_hand(model, batches, of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= of
        optimizer.step()


def alike_at_the_end(model, batches):
    """A cheat: rank 0's weights for all."""
    train_with(lambda model, ddp: model)(model, batches)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


@pytest.mark.parametrize(
    "train, complaint",
    [
        (train_with(lambda model, ddp: ddp), "[passed]"),
        (train_with(lambda model, ddp: model), "the weights of the ranks differ by more than 0.01"),
        (train_with(lambda model, ddp: ddp, lambda batches: batches[:5]), "agree with each other, but not with DDP"),
        (alike_at_the_end, "agree with each other, but not with DDP"),
        (lambda *args: by_hand(*args, of=2), "agree with each other, but not with DDP"),
        (lambda *args: by_hand(*args, of=3), "[passed]"),
    ],
)
def test_stays_together(capsys, train, complaint):
    checks.stays_together(train)
    assert complaint in capsys.readouterr().out


def trains_for_ever(model, batches):
    while True:
        pass


def test_an_endless_training_is_told(capsys, hurried):
    checks.stays_together(trains_for_ever)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after ") and "trains_for_ever" in out, out
