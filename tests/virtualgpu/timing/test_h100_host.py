"""What operations cost the host, beside what they cost that of one H100 (tests/gpu/h100_host.csv: PyTorch 2.11, a Xeon of Sapphire Rapids,
November 2026; of two visits): chains of 40 alike, of a few numbers, from an empty queue; microseconds for each of the 40."""

import contextlib
import csv
import functools
import math
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from tests.accuracy.kernels import within
from virtualgpu.hardware.settings import HOSTS

GPU = Path(__file__).parents[2] / "gpu"
TABLE, MIXED = GPU / "h100_host.csv", GPU / "mixed_host.csv"
LENGTH = 40
HOST = HOSTS["2026"]
# Of what operations in mixed order cost
ALIKE = {"evaluation": 20e-6 / HOST.forward, "forward": 20e-6 / HOST.forward, "backward": 16e-6 / HOST.backward}
IMAGES, TOKENS = (2, 64, 8, 8), (2, 8, 64)


class Of(nn.Module):
    """A function as a module, with or without a weight."""

    def __init__(self, function, *shape: int):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape)) if shape else None

    def forward(self, x):
        return self.function(x) if self.weight is None else self.function(x, self.weight)


def attention(x):
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q).squeeze(1)


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(64, 64)

    def forward(self, x):
        return self.cell(x, x) if isinstance(self.cell, nn.GRUCell) else self.cell(x, (x, x))[0]


CHAINS = {
    "linear": (lambda: nn.Linear(64, 64), TOKENS),
    "linear no bias": (lambda: nn.Linear(64, 64, bias=False), TOKENS),
    "matmul": (lambda: Of(lambda x, weight: x @ weight, 64, 64), TOKENS),
    "conv3x3": (lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), IMAGES),
    "conv1x1": (lambda: nn.Conv2d(64, 64, 1, bias=False), IMAGES),
    "batch_norm": (lambda: nn.BatchNorm2d(64), IMAGES),
    "relu": (nn.ReLU, IMAGES),
    "layer_norm": (lambda: nn.LayerNorm(64), TOKENS),
    "rms_norm": (lambda: nn.RMSNorm(64), TOKENS),
    "group_norm": (lambda: nn.GroupNorm(8, 64), IMAGES),
    "gelu": (nn.GELU, TOKENS),
    "silu": (nn.SiLU, TOKENS),
    "add": (lambda: Of(lambda x: x + x), IMAGES),
    "mul scalar": (lambda: Of(lambda x: x * 1.0), IMAGES),
    "softmax": (lambda: nn.Softmax(-1), TOKENS),
    "sdpa": (lambda: Of(attention), TOKENS),
    "views": (lambda: Of(lambda x: x.transpose(1, 2).unsqueeze(1).squeeze(1)), TOKENS),
    "grucell": (lambda: Cell(nn.GRUCell), (8, 64)),
    "lstmcell": (lambda: Cell(nn.LSTMCell), (8, 64)),
    "max_pool": (lambda: nn.MaxPool2d(3, 1, 1), IMAGES),
}
AUTOCAST = {"AMP bfloat16": torch.bfloat16, "AMP": torch.float16}


def rows() -> list[tuple[str, str, str, float]]:
    with open(TABLE, encoding="utf-8", newline="") as file:
        table = [(row["chain"], row["precision"], row["pass"], float(row["us"])) for row in csv.DictReader(file)]
    return [row for row in table if row[0] in CHAINS]


@functools.cache
def simulated(name: str, precision: str) -> dict[str, float]:
    """Microseconds by pass."""
    make, shape = CHAINS[name]
    with virtualgpu.dry_run(1, like="H100", host="2026"):
        clock, taken = virtualgpu.machine().clock, {}
        chain = nn.Sequential(*[make() for _ in range(LENGTH)]).cuda()
        x = torch.randn(shape, device="cuda").requires_grad_()
        if precision == "bfloat16":
            chain, x = chain.bfloat16(), x.detach().bfloat16().requires_grad_()

        def passed(kind, function):
            torch.cuda.synchronize()
            begin = clock.host
            result = function()
            taken[kind] = ALIKE[kind] * 1e6 * (clock.host - begin) / LENGTH
            return result

        def forward():
            with cast():
                return chain(x)

        dtype = AUTOCAST.get(precision)
        cast = contextlib.nullcontext if dtype is None else lambda: torch.autocast("cuda", dtype)
        for _ in range(2):
            chain.zero_grad()
            y = passed("forward", forward)
            x.grad, gradient = None, torch.ones_like(y)
            passed("backward", lambda y=y, gradient=gradient: y.backward(gradient))
        chain.eval()
        with torch.no_grad():
            passed("evaluation", forward)
        return taken


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_operations_in_mixed_order_cost_more_than_chains_of_them(pass_):
    """As each is followed by another, in a program as here."""
    with open(MIXED, encoding="utf-8", newline="") as file:
        times = [
            float(row["mixed_us"]) / float(row["parts_us"]) for row in csv.DictReader(file) if row["pass"] == pass_
        ]
    assert len(times) == 12 and 1 / ALIKE[pass_] == pytest.approx(median(times), rel=0.02)


@pytest.mark.parametrize("pass_", ["evaluation", "forward", "backward"])
def test_an_operation_costs_the_host_what_it_cost_that_of_the_h100(pass_):
    logs = [math.log(us / simulated(chain, precision)[pass_]) for chain, precision, kind, us in rows() if kind == pass_]
    assert len(logs) >= 15 and abs(median(logs)) < math.log(1.15) and within(logs, 30) > 0.6, sorted(
        map(math.exp, logs)
    )
