"""Convolutions that make an image, by the kernels that a Hopper takes."""

import pytest
import torch
from torch.nn import functional as F

import virtualgpu


def took(function) -> float:
    """Seconds of its kernels, the second time."""
    clock = virtualgpu.machine().clock
    function()
    before = clock.computing[0]
    function()
    return clock.computing[0] - before


def gradient_of_image(image, weight, stride: int) -> float:
    image = image.requires_grad_()
    result = F.conv2d(image, weight, None, stride, 1)
    gradient = torch.ones_like(result)
    return took(lambda: torch.autograd.grad(result, image, gradient, retain_graph=True))


@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_transposed_convolution_takes_what_the_gradient_of_an_image_does(stride, dtype):
    with virtualgpu.dry_run(1, like="H100"):
        read, weight = (
            torch.ones(*shape, device="cuda", dtype=dtype) for shape in ((16, 256, 28, 28), (256, 128, 4, 4))
        )
        made = F.conv_transpose2d(read, weight, None, stride, 1)
        forward = took(lambda: F.conv_transpose2d(read, weight, None, stride, 1))
        assert forward == pytest.approx(gradient_of_image(made.detach(), weight, stride))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_channels_first_are_reordered(dtype):
    with virtualgpu.dry_run(1, like="H100"):
        image, weight = (
            torch.ones(*shape, device="cuda", dtype=dtype) for shape in ((32, 128, 56, 56), (128, 128, 3, 3))
        )
        first = took(lambda: F.conv2d(image, weight, None, 1, 1))
        image, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (image, weight))
        assert 1.2 < first / took(lambda: F.conv2d(image, weight, None, 1, 1)) < 3


def test_a_large_one_comes_near_the_peak():
    """An H100's 800 TFLOPS for 128 x 256 tiles (tests/gpu/h100_convolutions.csv): four fifths of what the data sheet says."""
    with virtualgpu.dry_run(1, like="H100"):
        image, weight = (
            torch.ones(*shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
            for shape in ((128, 512, 28, 28), (1024, 512, 3, 3))
        )
        flops = 2 * 128 * 28 * 28 * weight.numel()
        assert 700e12 < flops / took(lambda: F.conv2d(image, weight, None, 1, 1)) < 900e12


def test_far_taps_are_left_to_amperes_kernels():
    with virtualgpu.dry_run(1, like="H100"):
        image, weight = (
            torch.ones(*shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
            for shape in ((32, 256, 56, 56), (256, 256, 3, 3))
        )
        near, far = (took(lambda d=d: F.conv2d(image, weight, None, 1, d, d)) for d in (4, 12))
        assert 1.4 < far / near < 2.5
