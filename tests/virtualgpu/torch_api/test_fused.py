"""Kernels that PyTorch chooses by the device: those of CUDA, where the CPU has them too."""

import pytest
import torch
from torch.nn import functional as F

import virtualgpu

SIZE = 1 << 20


@pytest.fixture
def gpus():
    return virtualgpu.gpus(1)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_has_the_numbers_of_the_cpu(gpus, p):
    found = []
    for device in ("cpu", "cuda"):
        x = torch.linspace(-1, 1, 999, device=device, requires_grad=True)
        torch.manual_seed(0)
        y = F.dropout(x, p)
        (y * y).sum().backward()
        found.append((y.detach().cpu(), x.grad.cpu()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dry", [False, True])
def test_dropout_keeps_one_byte_an_element(gpus, dry):
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        x = torch.zeros(SIZE, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = torch.nn.Dropout(0.5)(x)
        assert torch.cuda.memory_allocated() - before == (4 + 1) * SIZE
        y.sum().backward()
        del y
        assert torch.cuda.memory_allocated() - before == 4 * SIZE  # the gradient


def test_dropout_that_drops_nothing_or_all_is_pytorchs_own(gpus):
    x = torch.ones(8, device="cuda")
    assert torch.equal(F.dropout(x, 0.0), x)
    assert F.dropout(x, 1.0).count_nonzero() == 0
    assert F.dropout(x, 0.5, training=False) is not None
    assert F.dropout(x[:0], 0.5).numel() == 0
    assert F.dropout(torch.ones(8), 0.5).device.type == "cpu"


def test_a_scripted_function_drops_too(gpus):
    @torch.jit.script
    def scripted(x):
        return torch.dropout(x, 0.5, True)

    assert scripted(torch.ones(8, device="cuda")).device.type == "cuda"
