"""Derivatives across places: forward mode, batches of gradients, and what no gradient came to."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.nn.parallel._functions import Broadcast

import virtualgpu

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


@pytest.mark.parametrize("places", [(CPU, ONE), (ONE, CPU), (ZERO, ONE)], ids=str)
def test_a_tangent_is_copied_into_a_tensor_elsewhere(gpus, places):
    source, target = places
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 1, device=source), torch.full((2, 1), 5.0, device=source))
        there = torch.zeros(2, 1, device=target)
        there.copy_(dual)
        primal, tangent = forward_ad.unpack_dual(there)
    assert primal.device == target and primal.tolist() == [[1], [1]] and tangent.tolist() == [[5], [5]]


@pytest.mark.parametrize("places", [(CPU, ONE), (ONE, CPU), (ZERO, ONE)], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_tangent_goes_where_its_tensor_goes(gpus, places, mode):
    """Also of a tensor that requires no gradient, which is the common case."""
    source, target = places
    with forward_ad.dual_level(), mode():
        dual = forward_ad.make_dual(torch.ones(2, device=source), torch.full((2,), 5.0, device=source))
        primal, tangent = forward_ad.unpack_dual(dual.to(target) * 3)
        assert primal.device == tangent.device == target
        assert primal.tolist() == [3, 3] and tangent.tolist() == [15, 15]
        assert forward_ad.unpack_dual(torch.ones(2, device=source).to(target)).tangent is None


@pytest.mark.parametrize("places", [(CPU, ONE), (ONE, CPU), (ZERO, ONE)], ids=str)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_a_vectorized_jacobian_goes_through_a_copy(gpus, places, strategy):
    source, target = places
    out = jacobian(lambda x: x.to(target) ** 2, torch.arange(3.0, device=source), vectorize=True, strategy=strategy)
    assert out.device == (source if strategy == "reverse-mode" else target)
    assert out.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 4]]


def test_batched_gradients_go_through_a_copy_and_back(gpus):
    x = torch.arange(3.0, device=ZERO, requires_grad=True)
    y = x.to(ONE) * torch.arange(3.0, device=ONE)
    (batch,) = torch.autograd.grad(y, x, torch.eye(3, device=ONE), is_grads_batched=True)
    assert batch.device == ZERO and batch.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 2]]


@pytest.mark.parametrize("dry", [False, True])
def test_an_unused_copy_of_a_broadcast(gpus, dry):
    """Its gradient is zeros, on its own GPU."""
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        x = torch.ones(2, device=ZERO, requires_grad=True)
        used = Broadcast.apply([0, 1], x)[1]
        (used * 2).sum().backward()
        assert x.grad.device == ZERO
        if not dry:
            assert x.grad.tolist() == [2, 2]
