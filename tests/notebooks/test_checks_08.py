"""The graders of notebook 08: a training with three faults, and one that stays together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import checks
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def train_on_all(model, data, epochs, shuffled=True, means=False, reduced=lambda rank: True, reduce=None, grouped=True):
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
        if reduce:
            reduce(sums)
        elif reduced(dist.get_rank()):
            dist.all_reduce(sums)
        history.append((sums[0] / sums[1]).item())
    return history


def each_sample(model, data, epochs):
    """The loss of each sample goes to all ranks, as plain numbers."""
    ddp, sampler, history = DistributedDataParallel(model), DistributedSampler(data), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        own, of_all = [], [None] * dist.get_world_size()
        for x, y in DataLoader(data, 20, sampler=sampler):
            losses = nn.functional.cross_entropy(ddp(x.cuda()), y.cuda(), reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            own += losses.tolist()
        dist.all_gather_object(of_all, own)
        history.append(sum(map(sum, of_all)) / sum(map(len, of_all)))
    return history


@pytest.mark.parametrize("train, said", [
    (lambda *a: train_on_all(*a, shuffled=False), "in the order of the first: what tells the sampler"),
    (lambda *a: train_on_all(*a, means=True), "it returns means of means"),
    (lambda *a: train_on_all(*a, reduced=lambda rank: False), "the ranks return different losses"),
    (lambda *a: train_on_all(*a, reduced=lambda rank: rank == 0),
     "the ranks do not call the same collectives: one is in all_reduce of 2 numbers, another in all_reduce of 212 numbers"),
    (lambda *a: train_on_all(*a, reduce=lambda sums: dist.reduce(sums, dst=0)), "rank 0 returns the right losses, and rank 1 others"),
    (lambda *a: train_on_all(*a, grouped=False), "epoch "),
    (lambda *a: train_on_all(*a)[:1], "3 numbers are wanted, one an epoch"),
    (lambda *a: None, "3 numbers are wanted"),
    (train_on_all, "[passed]"),
    (lambda *a: [torch.tensor(loss) for loss in train_on_all(*a)], "[passed]"),
    (lambda *a: train_on_all(*a, reduce=lambda sums: dist.all_reduce(sums, dist.ReduceOp.AVG)), "[passed]"),
    (each_sample, "[passed]"),
])  # fmt: skip
def test_trains_on_all(says, train, said):
    says(said, checks.trains_on_all, train)


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


def weights_averaged_at_the_end(model, batches):
    train_with(lambda model, ddp: model)(model, batches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, dist.ReduceOp.AVG)


def weights_averaged_in_each_step(model, batches):
    """For SGD without momentum it comes to the same."""
    for batch in batches:
        weights_averaged_at_the_end(model, [batch])


def one_message(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, flat)
        mean = torch.stack(all_of_them).mean(0).split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), mean, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()


@pytest.mark.parametrize("train, said", [
    (train_with(lambda model, ddp: model), "the weights of the ranks differ by more than 0.01"),
    (train_with(lambda model, ddp: ddp, lambda batches: batches[:5]), "but not with DDP ... all batches used, once each?"),
    (alike_at_the_end, "agree with each other, but not with DDP"),
    (weights_averaged_at_the_end, "but not with DDP ... are gradients averaged in each step"),
    (lambda *args: by_hand(*args, of=2), "agree with each other, but not with DDP"),
    (no_end, "after 20 seconds ... in no_end"),
    (train_with(lambda model, ddp: ddp), "[passed]"),
    (lambda *args: by_hand(*args, of=3), "[passed]"),
    (one_message, "[passed]"),
    (weights_averaged_in_each_step, "[passed]"),
])  # fmt: skip
def test_stays_together(says, train, said):
    says(said, checks.stays_together, train)
