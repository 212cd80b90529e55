"""The graders of notebook 07, make it fit: training within a budget, and a model slimmed for one T4."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import checks
from tests.processes import no_end

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("gpu")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).to("cuda:0")


def whole(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.item()


def in_pieces(net, x, y, scale=1, result=True):
    total = 0
    for xs, ys in zip(x.chunk(8), y.chunk(8), strict=True):
        loss = F.cross_entropy(net(xs), ys) / 8
        (scale * loss).backward()
        total += loss.detach()
    return total if result else None


def on_the_cpu(net, x, y):
    loss = whole(net.cpu(), x.cpu(), y.cpu())
    net.cuda()
    return loss


def on_the_cpu_by_hand(net, x, y):
    """Without calling the net, whose inputs would tell."""
    parts = {name: p.cpu() for name, p in net.named_parameters()}
    hidden = torch.relu(F.linear(x.cpu(), parts["0.weight"], parts["0.bias"]))
    loss = F.cross_entropy(F.linear(hidden, parts["2.weight"], parts["2.bias"]), y.cpu())
    loss.backward()
    return loss.item()


def by_keyword(net, x, y):
    return in_pieces(lambda xs: net(input=xs), x, y)


def with_checkpoints(net, x, y):
    total = 0
    for xs, ys in zip(x.split(128), y.split(128), strict=True):
        out = checkpoint(net, xs, use_reentrant=False)
        loss = F.cross_entropy(out, ys, reduction="sum") / len(x)
        loss.backward()
        total = total + loss.detach().cpu()
    return total


def statistics_replaced(net, x, y):
    loss = whole(net, x, y)
    torch.cuda.max_memory_allocated = lambda device=None: 0
    return loss


def statistics_reset(net, x, y):
    loss = whole(net, x, y)
    torch.cuda.reset_peak_memory_stats()
    return loss


def by_hand(net, x, y):
    """Without backward()."""
    parameters, total = list(net.parameters()), 0
    for xs, ys in zip(x.split(256), y.split(256), strict=True):
        loss = F.cross_entropy(net(xs), ys) * len(xs) / len(x)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        total += loss.item()
    return total


def unequal(net, x, y):
    """A mean of means."""
    pieces = list(zip(x.split(300), y.split(300), strict=True))
    losses = [F.cross_entropy(net(xs), ys) / len(pieces) for xs, ys in pieces]
    sum(losses).backward()
    return sum(losses).item()


@pytest.mark.parametrize("step, said", [
    (whole, "right gradients, and a peak of"),
    (lambda *a: in_pieces(*a, scale=8), "8.00 times as long"),
    (unequal, "nearly those of the whole batch: where pieces are unequal, weigh each by its images, of 2048"),
    (lambda *a: in_pieces(*a, result=False), "the loss should be 2.3"),
    (lambda net, x, y: 2.3, "some parameters have no gradient"),
    (lambda net, x, y: torch.zeros(1 << 30, device="cuda"), "your code raised OutOfMemoryError: CUDA out of memory"),
    (on_the_cpu, "right gradients, computed on cpu: the task is to stay on cuda:0"),
    (on_the_cpu_by_hand, "right gradients, computed on cpu: the task is to stay on cuda:0"),
    (statistics_reset, "the peak was reset within the step"),
    (statistics_replaced, "right gradients, and a peak of"),
    (no_end, "after 30 seconds your code has not come to an end"),
    (in_pieces, "[passed]"),
    (by_keyword, "[passed]"),
    (with_checkpoints, "[passed]"),
    (by_hand, "[passed]"),
])  # fmt: skip
def test_within_budget(says, step, said):
    x, y = torch.randn(2048, 64), torch.arange(2048) % 10
    says(said, checks.within_budget, step, make_net, x, y, budget=4 * MIB)
    assert torch.cuda.memory_allocated() == 0


def test_a_full_gpu_is_not_the_readers_fault(gpu, says):
    """As when the cells ran in another order, and an error still keeps what it held."""
    held = [torch.zeros(1 << 20, dtype=torch.uint8, device=gpu) for _ in range(246)]
    x, y = torch.randn(2048, 64), torch.arange(2048) % 10
    out = says("MiB are taken before your code begins", checks.within_budget, in_pieces, make_net, x, y, 4 * MIB)
    assert "your code raised" not in out, out
    del held
    says("[passed]", checks.within_budget, in_pieces, make_net, x, y, 4 * MIB)


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers, dim, heads, hidden, words):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.output = nn.Linear(dim, words, bias=False)
        self.run = lambda block, x: block(x)

    def forward(self, text):
        x = self.words(text)
        for block in self.blocks:
            x = self.run(block, x)
        return self.output(x)


class Adapter(nn.Module):
    def __init__(self, layer, zeros=True):
        super().__init__()
        self.layer, where = layer, {"bias": False, "device": layer.weight.device}
        self.a, self.b = nn.Linear(layer.in_features, 4, **where), nn.Linear(4, layer.out_features, **where)
        if zeros:
            nn.init.zeros_(self.b.weight)
        else:
            nn.init.normal_(self.b.weight)

    def forward(self, x):
        return self.layer(x) + self.b(self.a(x))


def slim(net, freeze=True, blocks=slice(None), zeros=True, again=True):
    net.requires_grad_(not freeze).half()
    for block in net.blocks[blocks]:
        block.up, block.down = Adapter(block.up, zeros), Adapter(block.down, zeros)
    if again:
        net.run = lambda block, x: checkpoint(block, x, use_reentrant=False)


SIZES = {"layers": 8, "dim": 256, "heads": 4, "hidden": 8192, "words": 500}


class FourBit(nn.Module):
    """The old matrix is freed."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach().float().reshape(-1, 64)
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = ((weight / scale).round() + 8).to(torch.uint8)
        self.register_buffer("packed", codes[:, ::2] * 16 + codes[:, 1::2])
        self.register_buffer("scale", scale.half())
        self.weight = torch.empty(0, device=scale.device)

    def forward(self, x):
        codes = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten(1)
        weight = (codes.half() - 8) * self.scale
        return F.linear(x, weight.view(self.out_features, self.in_features).to(x.dtype))


def qlora(net):
    net.requires_grad_(False).half()
    for block in net.blocks:
        block.up, block.down = Adapter(FourBit(block.up)), Adapter(FourBit(block.down))
    net.run = lambda block, x: checkpoint(block, x, use_reentrant=False)


def new_biases(net):
    net.requires_grad_(False).half()
    for block in net.blocks:
        block.down.bias = nn.Parameter(torch.zeros(block.down.out_features, device=block.down.weight.device))
    net.run = lambda block, x: checkpoint(block, x, use_reentrant=False)


def adapters_on_one(net):
    net.requires_grad_(False).half()
    for block in net.blocks:
        block.up = Adapter(block.up)
    net.run = lambda block, x: checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize("change, said", [
    (lambda net: slim(net, again=False), "the peak is"),
    (lambda net: slim(net, freeze=False), "freeze them"),
    (lambda net: slim(net, zeros=False), "does not begin as it was"),
    (lambda net: slim(net, blocks=slice(1, None)), "block 0 does not learn"),
    (lambda net: slim(net, blocks=slice(0)), "nothing is left that trains"),
    (lambda net: net.nothing, "your code raised AttributeError"),
    (no_end, "after 60 seconds your code has not come to an end"),
    (slim, "[passed]"),
    (qlora, "[passed]"),
    (new_biases, "[passed]"),
    (adapters_on_one, "[passed]"),
])  # fmt: skip
def test_slims(says, change, said):
    says(said, checks.slims, change, Model, SIZES, budget=0.19)
