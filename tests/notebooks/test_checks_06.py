"""The graders of notebook 06, out of memory: an estimate from shapes, and a leak in a stranger's program."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from checks import notebook_06
from tests.processes import no_end

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def parts(widths, batch_size):
    """Bytes of the parameters, of each layer's input, and of the widest layer's output."""
    parameters = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    return 4 * parameters, 4 * batch_size * sum(widths[:-1]), 4 * batch_size * max(widths[1:])


def right(widths, batch_size):
    parameters, activations, widest = parts(widths, batch_size)
    return max(3 * parameters + activations + 2 * widest, 4 * parameters) / MIB


def layer_by_layer(widths, batch_size):
    """Backward walked through: what is held when each layer has its turn."""
    activations = [4 * batch_size * width / MIB for width in widths]
    weights = [4 * (a + 1) * b / MIB for a, b in itertools.pairwise(widths)]
    peak = gradients = 0
    for k in reversed(range(len(weights))):
        held = 3 * sum(weights) + sum(activations[: k + 1]) + gradients
        gradients += weights[k]
        peak = max(peak, held + 3 * activations[k + 1] * (k < len(weights) - 1), held + weights[k] + activations[k + 1])
    return peak


def by_the_modules(widths, batch_size):
    """A network on the meta device, NumPy's numbers."""
    net = nn.Sequential(*[nn.Linear(a, b, device="meta") for a, b in itertools.pairwise(widths)])
    parameters = sum(p.numel() for p in net.parameters())
    inputs = np.array([layer.in_features for layer in net]).sum() * batch_size
    widest = 2 * batch_size * max(layer.out_features for layer in net)
    return np.float32(4 * np.maximum(3 * parameters + inputs + widest, 4 * parameters) / MIB)


def by_running(widths, batch_size):
    return torch.tensor(notebook_06.measured(widths, batch_size))


@pytest.mark.parametrize("peak_mib, said", [
    (lambda widths, batch: parts(widths, batch)[0] / MIB, "0 of 12 are right within 10%"),
    (lambda widths, batch: 4 * parts(widths, batch)[0] / MIB, "3 of 12 are right within 10%. Farthest off, widths ["),
    (lambda widths, batch: sum(np.multiply(parts(widths, batch), (4, 1, 0))) / MIB, "Farthest off, widths [784, 256, 1024, 10]"),
    (lambda widths, batch: sum(np.multiply(parts(widths, batch), (3, 1, 1))) / MIB, "1 of 12 are right within 10%. Farthest off, widths [1024, 8192, 8192, 1024, 10]"),
    (lambda widths, batch: sum(np.multiply(parts(widths, batch), (4, 2, 0))) / MIB, "you say 1,044 MiB, and it takes 671"),
    (lambda widths, batch: right(widths, batch) * MIB, "it returns bytes, it seems"),
    (lambda widths, batch: None, "it returns None: a number of MiB is asked for"),
    (lambda widths, batch: f"{right(widths, batch)} MiB", "a number of MiB is asked for"),
    (lambda widths, batch: float("nan"), "it returns nan"),
    (lambda widths, batch: widths[9], "your code raised IndexError: list index out of range"),
    (no_end, "after 60 seconds your code stands in line 19, in no_end: is there a loop without an end?"),
    (right, "[passed]"),
    (layer_by_layer, "[passed]"),
    (by_the_modules, "[passed]"),
    (by_running, "[passed]"),
    (lambda widths, batch: 1.07 * right(widths, batch), "[passed]"),
])  # fmt: skip
def test_estimates(says, peak_mib, said):
    says(said, checks.estimates, peak_mib)


class Stranger:
    """The program of the exercise; each idea of a repair is an attribute."""

    image = staticmethod(lambda x, worst: x[worst].cpu())
    margin = staticmethod(lambda margin: margin.item())
    mode = staticmethod(torch.no_grad)
    trains = True

    def __init__(self, net, batches, device):
        self.net, self.batches, self.device = net.to(device), batches, device
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.hardest, self.report = [], []

    def train_step(self, x, y):
        x, y = x.to(self.device), y.to(self.device)
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        self.optimizer.zero_grad()
        losses.mean().backward()
        if self.trains:
            self.optimizer.step()
        worst = losses.argmax()
        self.hardest.append((self.image(x, worst), losses[worst].item()))

    def evaluate(self):
        self.net.eval()
        margins, right = [], 0
        with self.mode():
            for x, y in self.batches:
                scores = self.net(x.to(self.device))
                first, second = scores.topk(2, dim=1).values.unbind(dim=1)
                margins.append(self.margin((first - second).mean()))
                right += (scores.argmax(dim=1) == y.to(self.device)).sum().item()
        self.net.train()
        return {"right": right, "margin": sum(margins) / len(margins)}

    def epoch(self):
        for x, y in self.batches:
            self.train_step(x, y)
        self.report.append(self.evaluate())


def made(**ideas):
    return type("Repaired", (Stranger,), {name: staticmethod(idea) for name, idea in ideas.items()})


class Forgetful(Stranger):
    def epoch(self):
        super().epoch()
        self.hardest.clear()


class Silent(Stranger):
    def evaluate(self):
        return {"right": super().evaluate()["right"]}


class Untrained(Stranger):
    trains = False


class Nameless(Stranger):
    """Keeps the images under another name."""

    def __getattribute__(self, name):
        if name == "hardest":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def train_step(self, x, y):
        pass


class Circle(Stranger):
    """Refers to itself, as some programs do; what is garbage leaves nothing behind once Python has looked."""

    def epoch(self):
        held = [torch.zeros(MIB, device=self.device)]
        held.append(held)
        super().epoch()


class AsALoop:
    """Written anew: copies on the host, a generator, no method but epoch."""

    def __init__(self, net, batches, device):
        self.net, self.batches, self.device, self.hardest, self.report = net.to(device), batches, device, [], []
        self.adam = torch.optim.Adam(net.parameters(), lr=1e-3)

    def epoch(self):
        for x, y in self.batches:
            losses = F.cross_entropy(self.net(x.to(self.device)), y.to(self.device), reduction="none")
            self.adam.zero_grad()
            losses.mean().backward()
            self.adam.step()
            on_host = losses.detach().cpu()
            self.hardest.append((x[on_host.argmax()], on_host.max()))
        self.net.eval()
        with torch.inference_mode():
            found = [(self.net(x.to(self.device)).cpu(), y) for x, y in self.batches]
        self.net.train()
        gaps = [float(np.diff(np.sort(scores.numpy(), axis=1)[:, -2:], axis=1).mean()) for scores, _ in found]
        right = np.int64(sum(int((scores.argmax(1) == y).sum()) for scores, y in found))
        self.report.append({"right": right, "margin": np.mean(gaps)})


@pytest.mark.parametrize("run, said", [
    (made(image=lambda x, worst: x[worst], margin=lambda m: m, mode=torch.enable_grad), "still leaves ... KiB on the GPU"),
    (made(image=lambda x, worst: x[worst]), "an epoch of 5 batches still leaves 1"),
    (made(image=lambda x, worst: x[worst].clone()), "an epoch of 5 batches still leaves 5 KiB"),
    (made(margin=lambda m: m, mode=torch.enable_grad), "still leaves"),
    (Forgetful, "`hardest` has 0 images, and the program as it was 20"),
    (Silent, "`report` says nothing of 'margin' any more"),
    (Untrained, "it trains another network"),
    (Nameless, "the run has no `hardest` any more"),
    (made(image=lambda x, worst: x[0].cpu()), "`hardest` has another image"),
    (lambda net, batches, device: None, "your code raised AttributeError"),
    (no_end, "after 60 seconds your code stands in line 19, in no_end: is there a loop without an end?"),
    (Stranger, "[passed]"),
    (made(mode=torch.enable_grad), "[passed]"),
    (made(image=lambda x, worst: x[worst].tolist()), "[passed]"),
    (Circle, "[passed]"),
    (AsALoop, "[passed]"),
])  # fmt: skip
def test_leaks_nothing(says, run, said):
    says(said, checks.leaks_nothing, run)


def test_the_notebooks_full_gpu_does_not_matter(gpu, says):
    """As when the cells ran in another order, and an error still keeps what it held."""
    held = torch.zeros(246 << 20, dtype=torch.uint8, device=gpu)
    says("[passed]", checks.leaks_nothing, Stranger)
    del held
