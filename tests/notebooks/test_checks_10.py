"""The graders of notebook 10: an optimizer whose state is sharded, and a plan for tensor parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import checks
from tests.notebooks.answers import PASSED, table

UP, DOWN = '"up": ColwiseParallel()', '"down": RowwiseParallel()'
WHOLE = "ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())"

# Each complaint is alone: what DTensor logs of an error (two tracebacks a rank) is not shown
test_tensor_plan = table(checks.tensor_plan, "10", "plan Bottleneck", [
    ((UP, f'"up": {WHOLE}', DOWN, f'"down": {WHOLE}'), "forward needs {'all_gather_into_tensor': 2}; one all-reduce"),
    ((", " + DOWN, ""), "forward raised RuntimeError: "),
    ((f"{UP}, {DOWN}", ""), "rank 0 holds 100% of up's weight"),
    ((f'{UP}, "down"', '"middle"'), "the plan names ['middle']; the layers are ['narrow', 'up', 'down']"),
    ((f"{{{UP}, {DOWN}}}", "None"), "the plan is None; a dictionary is wanted"),
    (('"up"', '"u*"', '"down"', '"d*"'), PASSED),
])  # fmt: skip


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


GRADIENT, PADDED = "self.own.grad = torch.empty_like(self.own)", "F.pad(gradients, (0, self.padding))"
SCATTER = f"dist.reduce_scatter_tensor(self.own.grad, {PADDED}, dist.ReduceOp.AVG)"
GATHER, OWN = (
    "dist.all_gather_into_tensor(self.flat, self.own.detach())",
    ".chunk(dist.get_world_size())[dist.get_rank()]",
)
ALL_REDUCE = "dist.all_reduce(gradients, dist.ReduceOp.AVG)"
AS_DDP = ("self.flat.chunk(n)[dist.get_rank()].clone()", "self.flat.clone()", GRADIENT, ALL_REDUCE, SCATTER, f"self.own.grad = {PADDED}",
          GATHER, "self.flat = self.own.detach()")  # fmt: skip

test_shards_adam = table(checks.shards_adam, "10", "ZeRO1", [
    (AS_DDP, "the right weights, and a rank holds 8.0 bytes of Adam's averages per parameter; 2.0 are enough"),
    (("AVG", "SUM"), "with SGD the weights move ... times as far as in one process: sum, or mean?"),
    ((GATHER, f"self.flat{OWN}.copy_(self.own.detach())"), "the ranks end with different weights"),
    (("nn.utils.vector_to_parameters(self.flat, self.weights)", "pass"), "no weight of the model has changed"),
    # right, and half as much again is sent
    ((GRADIENT, ALL_REDUCE, SCATTER, f"self.own.grad = {PADDED}{OWN}"), "a rank sends 2.25 numbers per parameter; 1.50 are enough"),
    ((SCATTER, f"self.own.grad = {PADDED}{OWN}"), "with SGD the weights are not those of one process"),
    (("-len(flat) % n", "0"), "raised "),
    (("optimizer_class([self.own], **options)", "torch.optim.SGD([self.own], lr=0.1)"), "a rank makes no optimizer of the class that it is given (SGD)"),
    (("    def step(self):", "    def step(self):\n        if dist.get_rank() == 3:\n            return"), "rank 3 will not come to it: it has returned"),
    (EachApart, PASSED),
])  # fmt: skip
