"""The graders of notebook 09: ranks that leave together, and a training function that is killed and ends with the same bits."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import checks
from checks.notebook_09 import EPOCHS, EVERY, RANKS, Kill, killed
from notebooks.scripts import train_ddp

pytestmark = pytest.mark.usefixtures("no_gpus_before")


class Trained:
    """The parts of an answer, so that each test has the one that it replaces."""

    def __init__(self, model, data, path):
        self.model, self.data, self.path = model, data, path
        self.ddp, self.rank = DDP(model), dist.get_rank()
        self.sampler = DistributedSampler(data)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.epoch, self.done = 0, 0

    def train(self):
        if self.path.exists():
            self.restore(torch.load(self.path, map_location="cpu"))
        while self.epoch < EPOCHS:
            self.sampler.set_epoch(self.epoch)
            for x, y in self.rest():
                self.step(x, y)
                self.done += 1
                if self.done % EVERY == 0:
                    self.save()
            self.epoch, self.done = self.epoch + 1, 0

    def rest(self):
        return DataLoader(self.data, batch_size=8, sampler=list(self.sampler)[8 * self.done :])

    def step(self, x, y):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(x.cuda()), y.cuda()).backward()
        self.optimizer.step()

    def state(self):
        generators = [None] * dist.get_world_size()
        dist.all_gather_object(generators, torch.cuda.get_rng_state())
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": generators,
            "place": (self.epoch, self.done),
        }

    def save(self):
        state = self.state()
        if self.rank == 0:
            train_ddp.save(state, self.path)
        dist.barrier()

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.cuda.set_rng_state(state["generators"][self.rank])
        self.epoch, self.done = state["place"]


def as_function(kind):
    return lambda model, data, path: kind(model, data, path).train()


class NothingSaved(Trained):
    def save(self):
        pass


class WeightsOnly(Trained):
    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.epoch, self.done = state["place"]


class NoMomentum(Trained):
    def restore(self, state):
        optimizer = self.optimizer.state_dict()
        super().restore(state | {"optimizer": optimizer})


class RankZerosGenerator(Trained):
    def restore(self, state):
        super().restore(state | {"generators": state["generators"][:1] * RANKS})


class EpochAgain(Trained):
    def restore(self, state):
        super().restore(state)
        self.done = 0


class OtherBatches(Trained):
    """It skips by count, and the rest is in the order of the epoch before."""

    def restore(self, state):
        super().restore(state)
        self.sampler.set_epoch = lambda epoch: None


class InPlace(Trained):
    def save(self):
        state = self.state()
        if self.rank == 0:
            torch.save(state, self.path)
        dist.barrier()


class OwnFiles(Trained):
    """Each rank its generator in a file of its own, which belongs to whichever save came last."""

    def save(self):
        super().save()
        train_ddp.save(torch.cuda.get_rng_state(), self.path.with_suffix(f".{self.rank}"))

    def restore(self, state):
        super().restore(state)
        torch.cuda.set_rng_state(torch.load(self.path.with_suffix(f".{self.rank}")))


class SeldomSaved(Trained):
    def save(self):
        if not self.epoch:
            super().save()


class OneOrder(Trained):
    def train(self):
        self.sampler.set_epoch = lambda epoch: None
        super().train()


class NotWrapped(Trained):
    def step(self, x, y):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x.cuda()), y.cuda()).backward()
        self.optimizer.step()


class AllData(Trained):
    def rest(self):
        indexes = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return DataLoader(self.data, batch_size=16, sampler=indexes[16 * self.done :])


class OwnFilesByStep(Trained):
    """Right: their names say to which save they belong, and the last file to come, rank 0's, names it."""

    def save(self):
        train_ddp.save(torch.cuda.get_rng_state(), self.path.with_suffix(f".{self.rank}.{self.epoch}.{self.done}"))
        dist.barrier()
        super().save()

    def restore(self, state):
        super().restore(state)
        epoch, done = state["place"]
        torch.cuda.set_rng_state(torch.load(self.path.with_suffix(f".{self.rank}.{epoch}.{done}")))


class LoadedAndThrownAway(Trained):
    """Right, only slow: it loads the batches that are done."""

    def rest(self):
        batches = iter(DataLoader(self.data, batch_size=8, sampler=self.sampler))
        for _ in range(self.done):
            next(batches)
        return batches


class EveryBatch(Trained):
    """Right: saved after each batch, and a subset in place of a sampler's rest."""

    def train(self):
        if self.path.exists():
            self.restore(torch.load(self.path, map_location="cpu"))
        while self.epoch < EPOCHS:
            self.sampler.set_epoch(self.epoch)
            for x, y in DataLoader(Subset(self.data, list(self.sampler)[8 * self.done :]), batch_size=8):
                self.step(x, y)
                self.done += 1
                self.save()
            self.epoch, self.done = self.epoch + 1, 0


class ByHand(Trained):
    """Right without DDP, and without DistributedSampler."""

    def __init__(self, model, data, path):
        super().__init__(model, data, path)
        self.ddp = model

    def rest(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
        for part in order.split(16)[self.done :]:
            yield self.data[part[self.rank :: 2]]

    def step(self, x, y):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x.cuda()), y.cuda()).backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        self.optimizer.step()


@pytest.mark.parametrize("kind, said", [
    (NothingSaved, "nothing was saved, or nothing is read"),
    (WeightsOnly, "its generator is not back"),
    (NoMomentum, "what does the optimizer remember?"),
    (RankZerosGenerator, "rank 1 draws another rank's dropouts"),
    (EpochAgain, "are batches of its epoch trained twice"),
    (OtherBatches, "reads other samples than were left"),
    (InPlace, "was killed in the middle of a save; started again, rank"),
    (OwnFiles, "was killed in the middle of a save; started again, "),
    (SeldomSaved, "is it saved too seldom?"),
    (OneOrder, "every epoch has the samples in the order of the first"),
    (NotWrapped, "the ranks end with different weights: who averages the gradients?"),
    (AllData, "reads 112 of 112 samples, 224 times in all"),
    (Trained, "[passed]"),
    (OwnFilesByStep, "[passed]"),
    (LoadedAndThrownAway, "[passed]"),
    (EveryBatch, "[passed]"),
    (ByHand, "[passed]"),
])  # fmt: skip
def test_ends_the_same(says, kind, said):
    says(said, checks.ends_the_same, as_function(kind))


def test_code_that_raises(says):
    says("raised ZeroDivisionError: division by zero", checks.ends_the_same, lambda model, data, path: 1 / 0)


def by_max(noticed, step):
    stop = torch.tensor(int(noticed), device="cuda")
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    return bool(stop)


def every_tenth(noticed, step):
    return step % 10 == 9 and by_max(noticed, step)


def own_notice(noticed, step):
    return noticed


def only_who_knows(noticed, step):
    return noticed and by_max(noticed, step)


def everybody_must_know(noticed, step):
    if step % 10:
        return False
    stop = torch.tensor(int(noticed), device="cuda")
    dist.all_reduce(stop, dist.ReduceOp.MIN)
    return bool(stop)


def rank_zero_decides(noticed, step):
    if step % 10:
        return False
    stop = torch.tensor(int(noticed), device="cuda")
    dist.broadcast(stop, src=0)
    return bool(stop)


def at_the_end(noticed, step):
    return step % 50 == 49 and by_max(noticed, step)


def at_once(noticed, step):
    return True


def by_sum(noticed, step):
    if step % 10:
        return False
    stop = torch.tensor([float(noticed)]).cuda()
    dist.all_reduce(stop)
    return stop.item() > 0


def by_objects(noticed, step):
    if step % 10 != 3:
        return False
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, noticed)
    return any(everyone)


@pytest.mark.parametrize("leave, said", [
    (by_max, "in 100 steps the ranks talk to each other more than 11 times"),
    (own_notice, "one rank got a notice, and not every rank leaves"),
    (only_who_knows, "some ranks wait for others that do not come"),
    (everybody_must_know, "one rank got a notice, and not every rank leaves"),
    (rank_zero_decides, "not every rank leaves"),
    (at_the_end, "more than 10 steps pass"),
    (at_once, "the ranks leave, and there was no notice"),
    (every_tenth, "[passed]"),
    (by_sum, "[passed]"),
    (by_objects, "[passed]"),
])  # fmt: skip
def test_leaves_together(says, leave, said):
    says(said, checks.leaves_together, leave)


@pytest.mark.judge
def test_fifty_kills():
    """At every rank, batch and save that there is, by chance."""
    draws = random.Random(9)
    kills = [
        Kill(draws.randrange(RANKS), batch=draws.randrange(1, 15)) if draws.random() < 0.7 else Kill(0, save=draws.randrange(1, 5))
        for _ in range(50)
    ]  # fmt: skip
    assert killed(as_function(Trained), kills, seed=0) is None
