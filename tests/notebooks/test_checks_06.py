"""The graders of notebook 06, out of memory: an estimate from shapes, and a leak in a stranger's program."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
from checks import notebook_06
from tests.notebooks.answers import PASSED, solution, table
from tests.processes import no_end

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("no_gpus_before")


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


PEAK = "max(early_in_backward, 4 * parameters)"
ENDLESS = "after 60 seconds your code stands in line 19, in no_end: is there a loop without an end?"

test_estimates = table(checks.estimates, "06", "peak_mib", [
    ((PEAK, "parameters"), "0 of 12 are right within 10%"),
    ((PEAK, "4 * parameters"), "3 of 12 are right within 10%. Farthest off, widths ["),
    ((PEAK, "(4 * parameters + activations)"), "Farthest off, widths [784, 256, 1024, 10]"),
    (("2 * batch_size", "batch_size", PEAK, "early_in_backward"), "1 of 12 are right within 10%. Farthest off, widths [1024, 8192, 8192, 1024, 10]"),
    ((PEAK, "(4 * parameters + 2 * activations)"), "you say 1,044 MiB, and it takes 671"),
    ((" / 2**20", ""), "it returns bytes, it seems"),
    (lambda widths, batch: None, "it returns None: a number of MiB is asked for"),
    (lambda widths, batch: "9 MiB", "a number of MiB is asked for"),
    (lambda widths, batch: float("nan"), "it returns nan"),
    (lambda widths, batch: widths[9], "your code raised IndexError: list index out of range"),
    (no_end, ENDLESS),
    (layer_by_layer, PASSED),
    (by_the_modules, PASSED),
    (by_running, PASSED),
    (("return 4 *", "return 1.07 * 4 *"), PASSED),
])  # fmt: skip


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


KEEP, GRAPHS = "self.hardest.append((image.cpu(), loss))", "    @torch.no_grad()\n"
STEP = "        super().train_step(x, y)\n"
NO_HARDEST = "        pass\n\n    def __init__(self, *args):\n        super().__init__(*args)\n        del self.hardest\n\n    def pop(self):\n"
# it refers to itself, as some programs do; what is garbage leaves nothing behind once Python has looked
CIRCLE = "    def epoch(self):\n        held = [torch.zeros(1 << 20, device=self.device)]\n        held.append(held)\n        super().epoch()\n\n"

test_leaks_nothing = table(checks.leaks_nothing, "06", "Repaired", [
    (("(Run):", "(Run):\n    pass\n\n\nclass Other(Run):"), "still leaves ... KiB on the GPU"),
    (("image.cpu()", "image"), "an epoch of 5 batches still leaves 1"),
    (("image.cpu()", "image.clone()"), "an epoch of 5 batches still leaves 5 KiB"),
    ((".item()", "", GRAPHS, ""), "still leaves"),
    ((KEEP, "pass"), "`hardest` has 0 images, and the program as it was 20"),
    (('{**found, "margin": found["margin"].item()}', '{"right": found["right"]}'), "`report` says nothing of 'margin' any more"),
    ((STEP, "        self.optimizer.step = lambda: None\n" + STEP), "it trains another network"),
    ((STEP, NO_HARDEST), "the run has no `hardest` any more"),
    (("image.cpu()", "0 * image.cpu()"), "`hardest` has another image"),
    (lambda net, batches, device: None, "your code raised AttributeError"),
    (no_end, ENDLESS),
    ((GRAPHS, ""), PASSED),
    (("image.cpu()", "image.tolist()"), PASSED),
    (("    def train_step", CIRCLE + "    def train_step"), PASSED),
    (AsALoop, PASSED),
])  # fmt: skip


def test_the_notebooks_full_gpu_does_not_matter(gpu, says):
    """As when the cells ran in another order, and an error still keeps what it held."""
    held = torch.zeros(246 << 20, dtype=torch.uint8, device=gpu)
    says(PASSED, checks.leaks_nothing, *solution("06", "Repaired"))
    del held
