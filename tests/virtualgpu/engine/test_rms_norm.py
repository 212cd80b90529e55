"""RMS norm: one kernel each way. Bytes are those of an H100, PyTorch 2.11, 2026-11-26."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [
        (torch.float32, 16793600, [16764928, 16781312]),
        (torch.float16, 8404992, [8374272, 8390656]),
        (torch.bfloat16, 8404992, [8374272, 8390656]),
    ],
)
def test_its_bytes(dtype, forward, backward):
    with virtualgpu.dry_run(1, like="H100"):
        x = torch.randn(4096, 1024, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.ones(1024, device="cuda", dtype=dtype, requires_grad=True)
        before = torch.cuda.memory_allocated()
        out = F.rms_norm(x, (1024,), weight)
        assert torch.cuda.max_memory_allocated() - before == torch.cuda.memory_allocated() - before == forward
        ones = torch.ones_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, [x, weight], ones)
        assert [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before] == backward
        del grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (4, 8)])
@pytest.mark.parametrize("weighted", [True, False])
def test_numbers_are_the_cpus(gpus, dtype, shape, weighted):
    torch.manual_seed(0)
    x, weight, slope = (torch.randn(size, dtype=dtype) for size in ((2, 4, 8), shape, (2, 4, 8)))
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (x, weight)[: 1 + weighted]]
        out = F.rms_norm(leaves[0], shape, leaves[1] if weighted else None)
        results.append([t.cpu() for t in (out, *torch.autograd.grad(out, leaves, slope.to(device)))])
    assert "FusedRmsNorm" in out.grad_fn.name()
    torch.testing.assert_close(*results)


def test_what_is_not_fused(gpus):
    """Weights of another type, and channels last."""
    x = torch.randn(2, 4, 4, 8, device="cuda", requires_grad=True)
    assert "Fused" not in F.rms_norm(x.half(), (8,), torch.ones(8, device="cuda")).grad_fn.name()
    assert "Fused" not in F.rms_norm(x.to(memory_format=torch.channels_last), (8,)).grad_fn.name()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.rms_norm(x, (7,))


def test_second_derivatives_and_autocast(gpus):
    x, layer = torch.randn(2, 8, device="cuda", requires_grad=True), nn.RMSNorm(8).cuda()
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.sum().backward()
    assert x.grad.shape == x.shape
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype is torch.float32
