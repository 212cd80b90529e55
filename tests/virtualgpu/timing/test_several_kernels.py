"""Operations that C++ makes of several kernels, by their launches on an H100 (PyTorch 2.11, torch.profiler, 2026-11-27)."""

import pytest
import torch

import virtualgpu
from virtualgpu.hardware.specs import SPECS

LAUNCH = SPECS["H100"].kernel
LAUNCHES = {
    "logsumexp": (lambda x: x.logsumexp(1), 9),
    "multinomial": (lambda x: x.multinomial(1), 14),
    "randperm": (lambda x: torch.randperm(64, device="cuda"), 12),
    "mse_loss": (lambda x: torch.nn.functional.mse_loss(x, x), 2),
}


@pytest.fixture
def clock():
    with virtualgpu.dry_run(1, like="H100"):
        yield virtualgpu.machine().clock


def taken(clock, function):
    """Seconds of the kernels, and of the host."""
    function()
    kernels, host = clock.computing[0], clock.host
    function()
    return clock.computing[0] - kernels, clock.host - host


@pytest.mark.parametrize("name", LAUNCHES)
def test_it_takes_as_long_as_its_kernels(clock, name):
    function, launches = LAUNCHES[name]
    x = torch.rand(8, 4, device="cuda")
    kernels, host = taken(clock, lambda: function(x))
    assert kernels == pytest.approx(launches * LAUNCH, rel=0.1)
    assert host > taken(clock, x.exp)[1] * (1 + 0.15 * (launches - 1))


def test_few_rows_of_a_lookup_need_no_sorting(clock):
    table = torch.rand(10_000, 64, device="cuda", requires_grad=True)

    def seconds(count):
        rows = torch.zeros(count, dtype=torch.int64, device="cuda")
        found = torch.nn.functional.embedding(rows, table)
        gradient = torch.ones_like(found)
        return taken(clock, lambda: torch.autograd.grad(found, table, gradient, retain_graph=True))[0]

    assert seconds(3073) - seconds(3072) > 9 * LAUNCH
