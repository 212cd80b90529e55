"""Layer norm of half precision: mean and deviation in single precision, as CUDA keeps them, with numbers and in a dry run."""

import pytest
import torch
from torch.nn import functional as F

import virtualgpu

HALVES = [torch.float16, torch.bfloat16]
EPS = 1e-5


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("weighted", [True, False])
def test_results_are_the_cpus_and_statistics_are_not_rounded(gpus, half, weighted):
    torch.manual_seed(0)
    x, weight, bias, slope = torch.randn(6, 32), torch.randn(32), torch.randn(32), torch.randn(6, 32)
    x, weight, bias, slope = (tensor.to(half) for tensor in (x * 3 + 1, weight, bias, slope))
    both = {}
    for device in ("cpu", "cuda"):
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in (x, weight, bias)]
        weights = leaves[1:] if weighted else (None, None)
        out, mean, rstd = torch.native_layer_norm(leaves[0], (32,), *weights, EPS)
        grads = torch.autograd.grad(out, leaves if weighted else leaves[:1], slope.to(device))
        both[device] = out.detach().cpu(), mean, rstd, [grad.cpu() for grad in grads]
    out, mean, rstd, grads = both["cuda"]
    assert torch.equal(out, both["cpu"][0])
    assert mean.dtype is rstd.dtype is torch.float32 and mean.device.type == "cuda"
    torch.testing.assert_close(mean.cpu(), x.float().mean(-1, keepdim=True))
    exact = [tensor.float().requires_grad_() for tensor in (x, weight, bias)]
    found = F.layer_norm(exact[0], (32,), *(exact[1:] if weighted else ()))
    wanted = torch.autograd.grad(found, exact if weighted else exact[:1], slope.float())
    for one, other in zip(grads, wanted, strict=True):
        assert one.dtype is half
        torch.testing.assert_close(one, other.to(half))


@pytest.mark.parametrize("half", HALVES)
def test_the_same_bytes_and_times_in_a_dry_run(half):
    def step():
        x = torch.ones(64, 300, 8, device="cuda", dtype=half, requires_grad=True)
        weight, bias = (torch.ones(8, device="cuda", dtype=half, requires_grad=True) for _ in range(2))
        before = torch.cuda.memory_allocated()
        out = F.layer_norm(x, (8,), weight, bias)
        kept = torch.cuda.memory_allocated() - before
        out.backward(x.detach())
        torch.cuda.synchronize()
        grads = [(leaf.grad.dtype, leaf.grad.stride()) for leaf in (x, weight, bias)]
        return kept, torch.cuda.max_memory_allocated(), grads, virtualgpu.machine().clock.latest()

    with virtualgpu.gpus(1):
        real = step()
    assert real[0] == 64 * 300 * (8 * 2 + 2 * 4)
    with virtualgpu.dry_run(1):
        assert step() == real
