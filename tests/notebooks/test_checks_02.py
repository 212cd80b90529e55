"""The graders of notebook 02: a skip over the cut, and a model that the reader splits."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from tests.processes import no_end
from virtualgpu import session
from virtualgpu.hardware.specs import find_specs

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def skip_net(forward, above="cuda:1"):
    class SkipNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.below = nn.Linear(16, 16).to("cuda:0")
            self.above = nn.Linear(16, 16).to(above)

    SkipNet.forward = forward
    return SkipNet


def hidden(self, x):
    return self.above(torch.relu(self.below(x)).to(self.above.weight.device))


def fixed_above(self, x):
    weight, bias = self.above.weight.detach(), self.above.bias.detach()
    return F.linear(torch.relu(self.below(x)).to("cuda:1"), weight, bias) + x.to("cuda:1")


def elsewhere(place, back="cuda:1"):
    """The right numbers and gradients, from weights that travel."""

    def forward(self, x):
        moved = [
            layer_part.to(place) for layer in (self.below, self.above) for layer_part in (layer.weight, layer.bias)
        ]
        x = x.to(place)
        return (F.linear(torch.relu(F.linear(x, *moved[:2])), *moved[2:]) + x).to(back)

    return forward


def moves_above(self, x):
    return self.above.to(x.device)(torch.relu(self.below(x))) + x


@pytest.mark.parametrize("forward, said", [
    (lambda self, x: hidden(self, x) + x, "at least two devices, cuda:1 and cuda:0!"),
    (lambda self, x: hidden(self, x), "the numbers are not those"),
    (lambda self, x: (hidden(self, x.detach()) + x.detach().to("cuda:1")).requires_grad_(), "no gradient arrives"),
    (lambda self, x: hidden(self, x) + x.detach().to("cuda:1"), "another gradient arrives than without GPUs at x"),
    (fixed_above, "no gradient arrives at above.weight"),
    (torch.no_grad()(lambda self, x: hidden(self, x) + x.to("cuda:1")), "or under no_grad?"),
    (lambda self, x: hidden(self, x).cpu() + x.cpu(), "are right, but cpu computes"),
    (elsewhere("cpu"), "are right, but cpu computes"),
    (elsewhere("cuda:0"), "but cuda:1 computes nothing"),
    (moves_above, "the layers should stay on cuda:0 and cuda:1; they are on cuda:0 and cuda:0"),
    (no_end, "after 20 seconds rank 0 stands in ... in no_end ... ?"),
    (lambda self, x: hidden(self, x.clone()).add(x.to("cuda:1", non_blocking=True)), "[passed]"),
    (lambda self, x: hidden(self, x).to("cuda:0") + x, "[passed]"),
    (lambda self, x: hidden(self, x) + x.cpu().to("cuda:1"), "[passed]"),
])  # fmt: skip
def test_skip_repaired(says, forward, said):
    says(said, checks.skip_repaired, skip_net(forward))


def test_layers_on_one_gpu_are_told(says):
    make = skip_net(lambda self, x: hidden(self, x) + x, above="cuda:0")
    says("the layers should stay on cuda:0 and cuda:1", checks.skip_repaired, make)


class Chain(nn.Module):
    """Three convolutions and a skip, which need some 260 MiB for a step on eight images of 256 x 256."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.three = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        first = torch.relu(self.one(x))
        return self.three(torch.relu(self.two(first)) + first)


SHAPE = (8, 3, 256, 256)


def split_chain(places=("cuda:0", "cuda:0", "cuda:1"), forward=None, extra=None):
    class Split(Chain):
        def __init__(self):
            super().__init__()
            for layer, place in zip((self.one, self.two, self.three), places, strict=True):
                layer.to(place)
            if extra:
                extra(self)

    if forward:
        Split.forward = forward
    return Split


def crossing(self, x, first=lambda x: x):
    first = torch.relu(self.one(x.to(self.one.weight.device)))
    second = torch.relu(self.two(first.to(self.two.weight.device)))
    place = self.three.weight.device
    return self.three(second.to(place) + first.to(place))


def detached_skip(self, x):
    first = torch.relu(self.one(x))
    return self.three((torch.relu(self.two(first)) + first.detach()).to("cuda:1"))


def without_skip(self, x):
    return self.three(torch.relu(self.two(torch.relu(self.one(x)))).to("cuda:1"))


def weights_travel(self, x):
    out = Chain.forward(self.to("cuda:0"), x)
    self.to("cuda:1")
    return out


def on_the_cpu(self, x):
    weights = [part.cpu() for layer in (self.one, self.two, self.three) for part in (layer.weight, layer.bias)]
    first = F.conv2d(x.cpu(), *weights[:2], padding=1).relu()
    return F.conv2d(F.conv2d(first, *weights[2:4], padding=1).relu() + first, *weights[4:], padding=1)


def twice(self):
    self.all = nn.Sequential(self.one, self.two)


def by_a_hook(self):
    """The skip crosses in a hook before the last layer."""
    self.three.register_forward_pre_hook(lambda layer, inputs: inputs[0].to(layer.weight.device))


@pytest.mark.parametrize("make, said", [
    (split_chain(("cuda:0",) * 3), "8 images do not fit into two GPUs of 200 MiB: cuda:0 is full, and cuda:1 has held 0"),
    (split_chain(("cuda:1",) * 3, crossing), "cuda:1 is full, and cuda:0 has held 6 MiB so far"),
    (split_chain(("cuda:0", "cpu", "cuda:1"), crossing), "two.weight is still on the CPU"),
    (split_chain(forward=without_skip), "its outputs are not the plain model's"),
    (split_chain(forward=detached_skip), "not the gradient of one.weight: was something detached"),
    (split_chain(forward=torch.no_grad()(crossing)), "or under no_grad?"),
    (split_chain(forward=weights_travel), "was moved in forward: let the activations travel"),
    (split_chain(forward=on_the_cpu), "cpu computes"),
    (split_chain(forward=crossing, extra=twice), "has the name all.0.weight"),
    (split_chain(), "Expected all tensors to be on the same device"),
    (split_chain(forward=no_end), "after 60 seconds rank 0 stands in ... in no_end ... ?"),
    (split_chain(forward=crossing), "[passed]"),
    (split_chain(("cuda:1", "cuda:1", "cuda:0"), crossing), "[passed]"),
    (split_chain(extra=by_a_hook), "[passed]"),
])  # fmt: skip
def test_split_in_two(says, make, said):
    says(said, checks.split_in_two, make, Chain, SHAPE, memory="200 MiB")


def test_a_model_that_fits_on_one_gpu_must_use_both(says):
    said = "it fits on one GPU, and the other does nothing"
    says(said, checks.split_in_two, split_chain(("cuda:0",) * 3), Chain, SHAPE, memory="2 GiB")


def test_gpus_that_play_real_ones_are_there_after_grading(says, monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    session.activate(find_specs(2, "T4", None))
    x = torch.ones(3, device="cuda:1")
    says("[passed]", checks.skip_repaired, skip_net(lambda self, x: hidden(self, x) + x.to("cuda:1")))
    assert torch.cuda.device_count() == 2 and (x + 1).device == torch.device("cuda:1")
