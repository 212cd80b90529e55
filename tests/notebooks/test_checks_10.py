"""The graders of notebook 10: an optimizer whose state is sharded, and a plan for tensor parallel."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import checks
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


class Bottleneck(nn.Module):
    def __init__(self, dim=64, hidden=256):
        super().__init__()
        self.narrow, self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(torch.tanh(self.narrow(x)))))


class Endless(Bottleneck):
    def forward(self, x):
        no_end()


def plan(**styles):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    known = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
    known["whole"] = ColwiseParallel(output_layouts=Replicate())
    known["columns in words"] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))
    known["rows in words"] = RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    return {name: known[style] for name, style in styles.items()}


@pytest.mark.parametrize("styles, said", [
    ({"up": "whole", "down": "whole"}, "forward needs {'all_gather_into_tensor': 2}; one all-reduce"),
    ({"up": "columns"}, "forward raised RuntimeError: "),
    ({"up": "rows", "down": "columns"}, "with this plan, forward raised "),
    ({"narrow": "columns", "up": "columns", "down": "rows"}, "with this plan, forward raised "),
    ({}, "rank 0 holds 100% of up's weight"),
    ({"middle": "rows"}, "the plan names ['middle']; the layers are ['narrow', 'up', 'down']"),
    ({"m*": "rows"}, "the plan names ['m*']"),
    (None, "the plan is None; a dictionary is wanted"),
    ({"up": "columns", "down": "rows"}, "[passed]"),
    ({"u*": "columns", "d*": "rows"}, "[passed]"),
    ({"[a-u]p": "columns", "d???": "rows in words"}, "[passed]"),
    ({"down": "rows in words", "up": "columns in words"}, "[passed]"),
])  # fmt: skip
def test_tensor_plan(says, styles, said):
    """Each complaint is alone: what DTensor logs of an error (two tracebacks a rank) is not shown."""
    says(said, checks.tensor_plan, None if styles is None else plan(**styles), Bottleneck)


def test_a_layer_without_an_end_is_told(says):
    says("after 60 seconds ... forward come to an end?", checks.tensor_plan, plan(up="columns", down="rows"), Endless)


class Whole:
    """As DDP has it, by hand."""

    def __init__(self, model, optimizer_class, **options):
        self.weights = list(model.parameters())
        self.optimizer = optimizer_class(self.weights, **options)

    def step(self):
        self.average()
        self.optimizer.step()

    def average(self):
        for weight in self.weights:
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)


class Alone(Whole):
    def average(self):
        pass


class Flat:
    """All parameters in one row, a quarter of it for each rank."""

    reduce = dist.ReduceOp.AVG

    def __init__(self, model, optimizer_class, **options):
        self.weights, n = list(model.parameters()), dist.get_world_size()
        flat = nn.utils.parameters_to_vector(self.weights).detach()
        self.flat = F.pad(flat, (0, -len(flat) % n))
        self.own = nn.Parameter(self.flat.chunk(n)[dist.get_rank()].clone())
        self.optimizer = optimizer_class([self.own], **options)

    def step(self):
        self.own.grad = self.gradient()
        self.optimizer.step()
        self.spread()

    def gradients(self):
        flat = torch.cat([weight.grad.flatten() for weight in self.weights])
        return F.pad(flat, (0, len(self.flat) - len(flat)))

    def gradient(self):
        own = torch.empty_like(self.own)
        dist.reduce_scatter_tensor(own, self.gradients(), self.reduce)
        return own

    def spread(self):
        dist.all_gather_into_tensor(self.flat, self.own.detach())
        nn.utils.vector_to_parameters(self.flat, self.weights)


class Summed(Flat):
    reduce = dist.ReduceOp.SUM


class NotSpread(Flat):
    def spread(self):
        self.flat.chunk(dist.get_world_size())[dist.get_rank()].copy_(self.own.detach())
        nn.utils.vector_to_parameters(self.flat, self.weights)


class NotPutBack(Flat):
    def spread(self):
        dist.all_gather_into_tensor(self.flat, self.own.detach())


class AllReduced(Flat):
    """Right, and half as much again is sent."""

    def gradient(self):
        gradients = self.gradients()
        dist.all_reduce(gradients, dist.ReduceOp.AVG)
        return gradients.chunk(dist.get_world_size())[dist.get_rank()]


class OwnGradient(Flat):
    def gradient(self):
        return self.gradients().chunk(dist.get_world_size())[dist.get_rank()]


class NotPadded(Flat):
    def __init__(self, model, optimizer_class, **options):
        super().__init__(model, optimizer_class, **options)
        self.flat = self.flat[: sum(weight.numel() for weight in self.weights)]


class NoOptimizer(Whole):
    def __init__(self, model, optimizer_class, **options):
        super().__init__(model, lambda *args, **more: torch.optim.SGD(*args, lr=0.1), **options)


class EachApart:
    """Each parameter has shards of its own, and the sum is divided by hand."""

    def __init__(self, model, optimizer_class, **options):
        self.weights, self.n = list(model.parameters()), dist.get_world_size()
        self.own = [nn.Parameter(self.padded(w.detach()).chunk(self.n)[dist.get_rank()].clone()) for w in self.weights]
        self.optimizers = [optimizer_class([own], **options) for own in self.own]

    def padded(self, tensor):
        return F.pad(tensor.flatten(), (0, -tensor.numel() % self.n))

    def step(self):
        for weight, own, optimizer in zip(self.weights, self.own, self.optimizers, strict=True):
            own.grad = torch.empty_like(own)
            dist.reduce_scatter_tensor(own.grad, self.padded(weight.grad) / self.n)
            optimizer.step()
            whole = self.padded(weight.detach())
            dist.all_gather_into_tensor(whole, own.detach())
            weight.data.copy_(whole[: weight.numel()].view_as(weight))


class Lists(Flat):
    """The older collectives, which take lists."""

    def gradient(self):
        own, n = torch.empty_like(self.own), dist.get_world_size()
        dist.reduce_scatter(own, list(self.gradients().chunk(n)), dist.ReduceOp.AVG)
        return own

    def spread(self):
        dist.all_gather(list(self.flat.chunk(dist.get_world_size())), self.own.detach())
        nn.utils.vector_to_parameters(self.flat, self.weights)


class Owners(Flat):
    """Reduced to each shard's owner in turn, and broadcast by it."""

    def gradient(self):
        pieces = self.gradients().chunk(dist.get_world_size())
        for rank, piece in enumerate(pieces):
            dist.reduce(piece, rank, dist.ReduceOp.AVG)
        return pieces[dist.get_rank()]

    def spread(self):
        pieces = self.flat.chunk(dist.get_world_size())
        pieces[dist.get_rank()].copy_(self.own.detach())
        for rank, piece in enumerate(pieces):
            dist.broadcast(piece, rank)
        nn.utils.vector_to_parameters(self.flat, self.weights)


def function(model, optimizer_class, **options):
    """No class at all; and the shard is a view of the row."""
    from types import SimpleNamespace

    weights, n, rank = list(model.parameters()), dist.get_world_size(), dist.get_rank()
    count = sum(w.numel() for w in weights)
    size = -(-count // n)
    row = torch.zeros(n * size, device="cuda")
    row[:count] = torch.cat([w.detach().flatten() for w in weights])
    nn.utils.vector_to_parameters(row, weights)
    own = row[rank * size : (rank + 1) * size]
    optimizer = optimizer_class([own], **options)

    def step():
        gradients = torch.zeros_like(row)
        gradients[:count] = torch.cat([w.grad.flatten() for w in weights])
        own.grad = torch.empty_like(own)
        dist.reduce_scatter_tensor(own.grad, gradients, dist.ReduceOp.AVG)
        optimizer.step()
        dist.all_gather_into_tensor(row, own.clone())

    return SimpleNamespace(step=step)


@pytest.mark.parametrize("make, said", [
    (Whole, "the right weights, and a rank holds 8.0 bytes of Adam's averages per parameter; 2.0 are enough"),
    (Alone, "the ranks end with different weights"),
    (Summed, "with SGD the weights move ... times as far as in one process: sum, or mean?"),
    (NotSpread, "the ranks end with different weights"),
    (NotPutBack, "no weight of the model has changed"),
    (AllReduced, "a rank sends 2.25 numbers per parameter; 1.50 are enough"),
    (OwnGradient, "with SGD the weights are not those of one process"),
    (NotPadded, "raised "),
    (NoOptimizer, "a rank makes no optimizer of the class that it is given (SGD)"),
    (None, "raised TypeError"),
    (Flat, "[passed]"),
    (EachApart, "[passed]"),
    (Lists, "[passed]"),
    (Owners, "[passed]"),
    (function, "[passed]"),
])  # fmt: skip
def test_shards_adam(says, make, said):
    says(said, checks.shards_adam, make)


def test_a_rank_that_calls_no_collective_is_told(says):
    class Lonely(Flat):
        def step(self):
            if dist.get_rank() != 3:
                super().step()

    says("rank 3 will not come to it: it has returned", checks.shards_adam, Lonely)
