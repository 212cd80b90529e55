"""The graders of notebook 08: a training with three faults, and one that stays together."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import checks

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def train_on_all(model, data, epochs, shuffled=True, means=False, reduced=lambda rank: True, world=None, grouped=True):
    ddp, sampler, history = DistributedDataParallel(model) if grouped else model, DistributedSampler(data), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(epochs):
        if shuffled:
            sampler.set_epoch(epoch)
        sums = torch.zeros(2, device="cuda")
        for x, y in DataLoader(data, 20, sampler=sampler):
            loss = nn.functional.cross_entropy(ddp(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            weight = 1 if means else len(y)
            sums += torch.tensor([loss.item() * weight, weight], device="cuda")
        if reduced(dist.get_rank()):
            dist.all_reduce(sums)
        history.append((sums[0] / sums[1]).item())
    return history


@pytest.mark.parametrize(
    "train, complaint",
    [
        (lambda *a: [torch.tensor(loss) for loss in train_on_all(*a)], "[passed]"),
        (lambda *a: train_on_all(*a, shuffled=False), "in the order of the first: what tells the sampler"),
        (lambda *a: train_on_all(*a, means=True), "it returns means of means"),
        (lambda *a: train_on_all(*a, reduced=lambda rank: False), "the ranks return different losses"),
        (
            lambda *a: train_on_all(*a, reduced=lambda rank: rank == 0),
            "the ranks do not call the same collectives: one is in all_reduce of 2 numbers, another in all_reduce of 212 numbers",
        ),
        (lambda *a: train_on_all(*a, grouped=False), "epoch "),
        (lambda *a: train_on_all(*a)[:1], "3 numbers are wanted, one an epoch"),
        (lambda *a: None, "3 numbers are wanted"),
    ],
)
def test_trains_on_all(capsys, train, complaint):
    checks.trains_on_all(train)
    out = capsys.readouterr().out
    assert complaint in out, out


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
        time.sleep(0.01)


def test_an_endless_training_is_told(capsys, hurried):
    checks.stays_together(trains_for_ever)
    out = capsys.readouterr().out
    assert out.startswith("[not yet] after ") and "trains_for_ever" in out, out
