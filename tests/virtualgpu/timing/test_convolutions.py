"""FLOPs of convolutions, against a count of their products one by one: on ones, each product adds one to a sum."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

import virtualgpu
from virtualgpu import _compat
from virtualgpu.engine.timing import Timing
from virtualgpu.timing.flops import formula

aten = torch.ops.aten
CASES = [  # dimensions, groups, channels in, channels out, stride, dilation, transposed
    *itertools.product((1, 2, 3), (1, 2), (4,), (6,), (1, 2), (1, 2), (False, True)),
    (2, 8, 8, 8, 1, 1, False),  # depthwise
    (2, 8, 8, 24, 2, 1, False),  # with several filters a channel
    (2, 8, 8, 8, 2, 1, True),
    (2, 3, 6, 9, 1, 1, False),
]


@pytest.mark.parametrize("case", CASES)
def test_each_product_is_counted_once(case):
    dims, groups, wide, out, stride, dilation, transposed = case
    shape = (wide, out // groups) if transposed else (out, wide // groups)
    x, weight = torch.ones(2, wide, *[7, 6, 5][:dims]), torch.ones(*shape, *[3, 2, 2][:dims])
    settings = [[stride] * dims, [0] * dims, [dilation] * dims, transposed, [0] * dims, groups]
    y = aten.convolution.default(x, weight, None, *settings)
    assert formula(aten.convolution.default)(x, weight, None, *settings, out_val=y) == 2 * y.sum()
    for mask in itertools.product((False, True), repeat=3):
        arguments = (torch.ones_like(y), x, weight, [out], *settings, list(mask))
        gradients = aten.convolution_backward.default(*arguments)
        count = sum(2 * gradient.sum() for gradient, asked in zip(gradients[:2], mask, strict=False) if asked)
        assert formula(aten.convolution_backward.default)(*arguments, out_val=gradients) == count
        if groups == 1:  # PyTorch counts these as we do
            assert _compat.flop_formula(aten.convolution_backward.default)(*arguments, out_val=gradients) == count


def test_a_convolution_of_another_name_counts_the_same():
    x, weight = torch.ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3)
    y = aten._slow_conv2d_forward.default(x, weight, [3, 3], None, [1, 1], [0, 0])
    assert formula(aten._slow_conv2d_forward.default)(x, weight, [3, 3], None, [1, 1], [0, 0], out_val=y) == 2 * y.sum()
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True)
    assert formula(aten._convolution.default)(x, weight, None, *settings, out_val=y) == 2 * y.sum()


@pytest.mark.parametrize(
    "make", [models.efficientnet_b0, models.convnext_tiny, models.mobilenet_v3_small, models.resnext50_32x4d]
)
def test_a_backward_pass_is_two_forward_passes(make, monkeypatch):
    flops = {False: 0, True: 0}
    seconds = Timing._multiplying

    def counted(self, op, args, kwargs, tensors, out, *others):
        flops[_compat.graph_task() != -1] += op.formula(*args, **kwargs, out_val=out)
        return seconds(self, op, args, kwargs, tensors, out, *others)

    monkeypatch.setattr(Timing, "_multiplying", counted)
    with virtualgpu.dry_run(1), torch.device("cuda"):
        loss = nn.functional.cross_entropy(make()(torch.empty(2, 3, 96, 96)), torch.zeros(2, dtype=torch.long))
        loss.backward()
    assert 1.85 < flops[True] / flops[False] <= 2  # no gradient of the images


def test_a_transposed_convolution_that_makes_few_channels_is_short():
    """Of as many channels: a quarter of the products. An A100, as the rule for it is the one for most cards."""
    with virtualgpu.dry_run(1, like="A100"):
        clock, seconds = virtualgpu.machine().clock, []
        image = torch.empty(16, 512, 32, 32, device="cuda")
        for made in (512, 128):
            weight = torch.empty(512, made, 4, 4, device="cuda")
            before = clock.computing[0]
            F.conv_transpose2d(image, weight, stride=2, padding=1)
            seconds.append(clock.computing[0] - before)
    assert 2.5 < seconds[0] / seconds[1] < 5


@pytest.mark.parametrize("card", ("A100", "H100"))
@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_transposed_convolution_takes_what_the_gradient_of_an_image_does(card, stride, dtype):
    def seconds(function):
        before = virtualgpu.machine().clock.computing[0]
        result = function()
        return result, virtualgpu.machine().clock.computing[0] - before

    with virtualgpu.dry_run(1, like=card):
        read, weight = (
            torch.ones(*shape, device="cuda", dtype=dtype) for shape in ((16, 256, 28, 28), (256, 128, 4, 4))
        )
        made, forward = seconds(lambda: F.conv_transpose2d(read, weight, None, stride, 1))
        image = made.detach().requires_grad_()
        result = F.conv2d(image, weight, None, stride, 1)
        gradient = torch.ones_like(result)
        _, backward = seconds(lambda: torch.autograd.grad(result, image, gradient))
    assert forward == pytest.approx(backward)


def test_the_gradient_of_a_bias_is_a_sum_over_all_but_the_channels():
    def seconds(function):
        before = virtualgpu.machine().clock.computing[0]
        function()
        return virtualgpu.machine().clock.computing[0] - before

    def backward(bias):
        weight = torch.ones(64, 64, 3, 3, device="cuda", requires_grad=True)
        bias = torch.ones(64, device="cuda", requires_grad=True) if bias else None
        result = torch.nn.functional.conv2d(x, weight, bias, padding=1)
        return lambda: torch.autograd.grad(result, [weight] if bias is None else [weight, bias], gradient)

    with virtualgpu.dry_run(1, like="H100"):
        x, gradient = (torch.ones(32, 64, 56, 56, device="cuda") for _ in range(2))
        without, with_bias = (seconds(backward(bias)) for bias in (False, True))
        assert with_bias - without == pytest.approx(seconds(lambda: gradient.sum((0, 2, 3))), rel=0.02)
