"""Derivatives that write in place on a GPU: one block, as an H100 had (PyTorch 2.11, 2026-11-26), and the CPU's numbers."""

import pytest
import torch
from torch.nn import functional as F

import virtualgpu

INDEX = [0, 2, 2]
CALLS = {
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(2)[0],
    "max": lambda x: x.max(0)[0],
    "gather": lambda x: x.gather(0, torch.tensor([INDEX], device=x.device)),
    "index_select": lambda x: x.index_select(0, torch.tensor(INDEX, device=x.device)),
    "take": lambda x: x.take(torch.tensor(INDEX, device=x.device)),
    "cummax": lambda x: x.cummax(0)[0],
    "index": lambda x: x[torch.tensor(INDEX, device=x.device)],
    "loss": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_block_for_the_gradient(name):
    with virtualgpu.dry_run(1, like="H100"):
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        out = CALLS[name](x)
        ones = torch.ones_like(out)
        before = torch.cuda.memory_stats()["allocation.large_pool.allocated"]
        gradient = torch.autograd.grad(out, x, ones)
        assert torch.cuda.memory_stats()["allocation.large_pool.allocated"] - before == 1
        del out, ones, gradient


@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_the_cpus(gpus, name):
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    grads = []
    for device in ("cpu", "cuda"):
        leaf = x.to(device, copy=True).requires_grad_()
        grads.append(torch.autograd.grad(CALLS[name](leaf).square().sum(), leaf)[0].cpu())
    assert torch.equal(*grads)
    assert torch.cuda.memory_allocated() == 0 or device == "cuda"
