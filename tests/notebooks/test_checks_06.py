"""The graders of notebook 06, out of memory: an estimate from shapes, and a leak in a stranger's program."""

import itertools

import numpy as np
import torch
from torch import nn

import checks
from tests.notebooks.answers import PASSED, solution, table
from tests.processes import no_end
from virtualgpu import _compat

MIB = 1 << 20


def by_the_modules(widths, batch_size):
    """A network on the meta device, NumPy's numbers."""
    net = nn.Sequential(*[nn.Linear(a, b, device="meta") for a, b in itertools.pairwise(widths)])
    parameters = sum(p.numel() for p in net.parameters())
    inputs = np.array([layer.in_features for layer in net]).sum() * batch_size
    widest = 2 * batch_size * max(layer.out_features for layer in net)
    return np.float32(4 * np.maximum(3 * parameters + inputs + widest, 4 * parameters) / MIB)


PEAK = "max(early_in_backward, 4 * parameters)"
EARLY = (  # older versions of PyTorch keep workspaces
    "0 of 12 are right within 10%. Farthest off, widths [784, 256, 1024, 10]" if _compat.KEEPS_WORKSPACES
    else "1 of 12 are right within 10%. Farthest off, widths [1024, 8192, 8192, 1024, 10]"
)  # fmt: skip

test_estimates = table(checks.estimates, "06", "peak_mib", [
    ((PEAK, "(4 * parameters + activations)"), "Farthest off, widths [784, 256, 1024, 10]"),
    (("2 * batch_size", "batch_size", PEAK, "early_in_backward"), EARLY),
    ((" / 2**20", ""), "it returns bytes, it seems"),
    (lambda widths, batch: None, "it returns None: a number of MiB is asked for"),
    (lambda widths, batch: float("nan"), "it returns nan"),
    (no_end, "after 60 seconds your code stands in line 19, in no_end: is there a loop without an end?"),
    (by_the_modules, PASSED),
    (("return 4 *", "return 1.07 * 4 *"), PASSED),
])  # fmt: skip


KEEP = "self.hardest.append((image.cpu(), loss))"
STEP = "        super().train_step(x, y)\n"
NO_HARDEST = "        pass\n\n    def __init__(self, *args):\n        super().__init__(*args)\n        del self.hardest\n\n    def pop(self):\n"
# it refers to itself, as some programs do; what is garbage leaves nothing behind once Python has looked
CIRCLE = "    def epoch(self):\n        held = [torch.zeros(1 << 20, device=self.device)]\n        held.append(held)\n        super().epoch()\n\n"

test_leaks_nothing = table(checks.leaks_nothing, "06", "Repaired", [
    (("(Run):", "(Run):\n    pass\n\n\nclass Other(Run):"), "still leaves ... KiB on the GPU"),
    (("image.cpu()", "image.clone()"), "an epoch of 5 batches still leaves 5 KiB"),
    ((KEEP, "pass"), "`hardest` has 0 images, and the program as it was 20"),
    (('{**found, "margin": found["margin"].item()}', '{"right": found["right"]}'), "`report` says nothing of 'margin' any more"),
    ((STEP, "        self.optimizer.step = lambda: None\n" + STEP), "it trains another network"),
    ((STEP, NO_HARDEST), "the run has no `hardest` any more"),
    (("image.cpu()", "0 * image.cpu()"), "`hardest` has another image"),
    ((KEEP, "self.hardest.append((image.tolist(), torch.tensor(loss)))"), PASSED),
    (("    def train_step", CIRCLE + "    def train_step"), PASSED),
])  # fmt: skip


def test_the_notebooks_full_gpu_does_not_matter(gpu, says):
    """As when the cells ran in another order, and an error still keeps what it held."""
    held = torch.zeros(246 << 20, dtype=torch.uint8, device=gpu)
    says(PASSED, checks.leaks_nothing, *solution("06", "Repaired"))
    del held
