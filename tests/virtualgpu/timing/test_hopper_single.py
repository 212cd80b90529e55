"""Convolutions in single precision, by the kernels that a Hopper takes."""

import pytest
import torch
from torch.nn import functional as F

import virtualgpu
from tests.virtualgpu.timing.test_hopper_images import gradient_of_image, took


@pytest.fixture(autouse=True)
def without_tf32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def ones(*shape: int, last: bool = False) -> torch.Tensor:
    made = torch.ones(*shape, device="cuda")
    return made.contiguous(memory_format=torch.channels_last) if last else made


def gradient_of_weight(image, weight, function=F.conv2d) -> float:
    weight = weight.requires_grad_()
    result = function(image, weight, None, 1, 1)
    gradient = torch.ones_like(result)
    return took(lambda: torch.autograd.grad(result, weight, gradient, retain_graph=True))


@pytest.mark.parametrize("stride", (1, 2))
def test_a_transposed_convolution_takes_what_the_gradient_of_an_image_does(stride):
    with virtualgpu.dry_run(1, like="H100"):
        read, weight = ones(16, 256, 28, 28), ones(256, 128, 4, 4)
        made = F.conv_transpose2d(read, weight, None, stride, 1)
        forward = took(lambda: F.conv_transpose2d(read, weight, None, stride, 1))
        assert forward == pytest.approx(gradient_of_image(made.detach(), weight, stride))


def test_the_gradient_of_a_transposed_ones_weight_is_that_of_a_plain_one():
    with virtualgpu.dry_run(1, like="H100"):
        small, large, weight = ones(16, 256, 28, 28), ones(16, 128, 28, 28), ones(256, 128, 3, 3)
        plain = gradient_of_weight(large, weight)
        assert gradient_of_weight(small, weight, F.conv_transpose2d) == pytest.approx(plain)


def test_two_blocks_come_and_go_together():
    """392 tiles of 256 x 64 on 132 multiprocessors take four rounds, not three: 458 us of an H100 (tests/gpu/h100_convolutions.csv)."""
    with virtualgpu.dry_run(1, like="H100"):
        image, weight = ones(128, 128, 56, 56), ones(64, 128, 3, 3)
        assert took(lambda: F.conv2d(image, weight, None, 2, 1)) == pytest.approx(458e-6, rel=0.1)


def test_channels_last_are_reordered():
    def seconds(last: bool) -> float:
        image, weight = ones(32, 256, 56, 56, last=last), ones(256, 256, 1, 1)
        return took(lambda: F.conv2d(image, weight))

    with virtualgpu.dry_run(1, like="H100"):
        assert 1.2 < seconds(last=True) / seconds(last=False) < 2


def test_winograds_way_to_a_weight_counts_fewer_products():
    """At the peak of an H100 a plain product would take 1770 us: 828 (tests/gpu/h100_convolutions.csv, 8 x 512 x 56 x 56)."""
    with virtualgpu.dry_run(1, like="H100"):
        seconds = gradient_of_weight(ones(8, 512, 56, 56), ones(512, 512, 3, 3))
        assert seconds == pytest.approx(828e-6, rel=0.15)
