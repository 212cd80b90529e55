"""Kernels that go through numbers one by one: how they lie, where they were, and in which pass."""

import pytest
import torch

import virtualgpu
from virtualgpu.timing.memory_bound import close, one_by_one


@pytest.fixture
def clock():
    with virtualgpu.dry_run(1, like="H100"):
        yield virtualgpu.machine().clock


def seconds(clock, function):
    """Of its kernels; to the picosecond, as they are added up."""
    before = clock.computing[0]
    function()
    return round(clock.computing[0] - before, 12)


def cuda(*shape, dtype=torch.float32, grad=False):
    return torch.ones(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def test_a_cast_takes_as_long_in_the_backward_pass(clock):
    x, gradient = cuda(4096, 4096, grad=True), cuda(4096, 4096, dtype=torch.bfloat16)
    back = seconds(clock, lambda: torch.autograd.grad(x.to(torch.bfloat16), x, gradient))
    there = seconds(clock, lambda: x.detach().clone().to(torch.bfloat16)) - seconds(clock, x.detach().clone)
    assert back - there == pytest.approx(seconds(clock, lambda: gradient.to(torch.float32)), rel=0.05)


def test_pictures_with_channels_last_lie_close(clock):
    first = cuda(32, 64, 28, 28)
    last = first.contiguous(memory_format=torch.channels_last)
    assert seconds(clock, lambda: torch.cat([last, last], 1)) == seconds(clock, lambda: torch.cat([first, first], 1))


def test_a_norm_of_a_transposed_tensor_copies_it_first(clock):
    x, lies_close = cuda(64, 512, 196).mT, cuda(64, 196, 512)
    norm = torch.nn.LayerNorm(512).cuda()
    more = seconds(clock, lambda: norm(x)) - seconds(clock, lambda: norm(lies_close))
    assert more == pytest.approx(seconds(clock, x.contiguous), rel=0.05)


def test_dimensions_that_follow_each_other_are_one(clock):
    def cycles(x, made):
        return one_by_one([x, made]) / made.numel()

    heads = cuda(8, 1024, 16, 64).transpose(1, 2)
    rows = cuda(8192, 16, 128)[..., :64]
    made = cuda(8, 16, 1024, 64)
    assert cycles(rows, cuda(8192, 16, 64)) < cycles(heads, made)  # two stretches, and four
    assert one_by_one([made, made]) == 0
    assert close((2, 3, 4)) == cuda(2, 3, 4).stride()
