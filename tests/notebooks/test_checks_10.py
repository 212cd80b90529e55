"""The graders of notebook 10: an optimizer whose state is sharded, and a plan for tensor parallel."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import checks
from tests.notebooks.answers import PASSED, defined, solution, table
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")

UP, DOWN = '"up": ColwiseParallel()', '"down": RowwiseParallel()'
WHOLE = "ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())"
IN_WORDS = "RowwiseParallel(input_layouts=torch.distributed.tensor.Shard(-1), output_layouts=torch.distributed.tensor.Replicate())"

# Each complaint is alone: what DTensor logs of an error (two tracebacks a rank) is not shown
test_tensor_plan = table(checks.tensor_plan, "10", "plan Bottleneck", [
    ((UP, f'"up": {WHOLE}', DOWN, f'"down": {WHOLE}'), "forward needs {'all_gather_into_tensor': 2}; one all-reduce"),
    ((", " + DOWN, ""), "forward raised RuntimeError: "),
    (('"up"', '"x"', '"down"', '"up"', '"x"', '"down"'), "with this plan, forward raised "),
    ((UP, '"narrow": ColwiseParallel(), ' + UP), "with this plan, forward raised "),
    ((f"{UP}, {DOWN}", ""), "rank 0 holds 100% of up's weight"),
    ((f'{UP}, "down"', '"middle"'), "the plan names ['middle']; the layers are ['narrow', 'up', 'down']"),
    ((f'{UP}, "down"', '"m*"'), "the plan names ['m*']"),
    ((f"{{{UP}, {DOWN}}}", "None"), "the plan is None; a dictionary is wanted"),
    (('"up"', '"u*"', '"down"', '"d*"'), PASSED),
    (('"up"', '"[a-u]p"', DOWN, f'"d???": {IN_WORDS}'), PASSED),
    ((f"{UP}, {DOWN}", f"{DOWN}, {UP}"), PASSED),
])  # fmt: skip


def test_a_layer_without_an_end_is_told(says):
    class Endless(defined("10", "Bottleneck")["Bottleneck"]):
        def forward(self, x):
            no_end()

    says("after 60 seconds ... forward come to an end?", checks.tensor_plan, *solution("10", "plan"), Endless)


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


def without_a_class(model, optimizer_class, **options):
    """No class at all; and the shard is a view of the row."""
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


GRADIENT, PADDED = "self.own.grad = torch.empty_like(self.own)", "F.pad(gradients, (0, self.padding))"
SCATTER = f"dist.reduce_scatter_tensor(self.own.grad, {PADDED}, dist.ReduceOp.AVG)"
GATHER, PUT_BACK = (
    "dist.all_gather_into_tensor(self.flat, self.own.detach())",
    "nn.utils.vector_to_parameters(self.flat, self.weights)",
)
OWN, PIECES = ".chunk(dist.get_world_size())[dist.get_rank()]", ".chunk(dist.get_world_size())"
ALL_REDUCE = "dist.all_reduce(gradients, dist.ReduceOp.AVG)"
AS_DDP = ("self.flat.chunk(n)[dist.get_rank()].clone()", "self.flat.clone()", GRADIENT, ALL_REDUCE, SCATTER, f"self.own.grad = {PADDED}",
          GATHER, "self.flat = self.own.detach()")  # fmt: skip
LISTS = (SCATTER, f"dist.reduce_scatter(self.own.grad, list({PADDED}{PIECES}), dist.ReduceOp.AVG)",
         GATHER, f"dist.all_gather(list(self.flat{PIECES}), self.own.detach())")  # fmt: skip
# reduced to each shard's owner in turn, and broadcast by it
OWNERS = (GRADIENT, f"pieces = {PADDED}{PIECES}\n        [dist.reduce(piece, rank, dist.ReduceOp.AVG) for rank, piece in enumerate(pieces)]",
          SCATTER, "self.own.grad = pieces[dist.get_rank()]",
          GATHER, f"self.flat{OWN}.copy_(self.own.detach())\n        [dist.broadcast(piece, rank) for rank, piece in enumerate(self.flat{PIECES})]")  # fmt: skip

test_shards_adam = table(checks.shards_adam, "10", "ZeRO1", [
    (AS_DDP, "the right weights, and a rank holds 8.0 bytes of Adam's averages per parameter; 2.0 are enough"),
    ((*AS_DDP, ALL_REDUCE, "pass"), "the ranks end with different weights"),
    (("AVG", "SUM"), "with SGD the weights move ... times as far as in one process: sum, or mean?"),
    ((GATHER, f"self.flat{OWN}.copy_(self.own.detach())"), "the ranks end with different weights"),
    ((PUT_BACK, "pass"), "no weight of the model has changed"),
    # right, and half as much again is sent
    ((GRADIENT, ALL_REDUCE, SCATTER, f"self.own.grad = {PADDED}{OWN}"), "a rank sends 2.25 numbers per parameter; 1.50 are enough"),
    ((SCATTER, f"self.own.grad = {PADDED}{OWN}"), "with SGD the weights are not those of one process"),
    (("-len(flat) % n", "0"), "raised "),
    (("optimizer_class([self.own], **options)", "torch.optim.SGD([self.own], lr=0.1)"), "a rank makes no optimizer of the class that it is given (SGD)"),
    (None, "raised TypeError"),
    (("    def step(self):", "    def step(self):\n        if dist.get_rank() == 3:\n            return"), "rank 3 will not come to it: it has returned"),
    (EachApart, PASSED),
    (LISTS, PASSED),
    (OWNERS, PASSED),
    (without_a_class, PASSED),
])  # fmt: skip
