"""FLOPs of convolutions, against a count of their products one by one: on ones, each product adds one to a sum."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torchvision import models

import virtualgpu
from tests.virtualgpu.timing.test_kernels import convolution, cuda, seconds
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


def test_the_gradient_of_a_bias_is_a_sum_over_all_but_the_channels():
    gradients = partial(convolution, (32, 64, 56, 56), 64, 3, padding=1, gradients=True)
    more = seconds(partial(gradients, bias=True), "H100") - seconds(gradients, "H100")
    assert more == pytest.approx(seconds(lambda: partial(cuda(32, 64, 56, 56).sum, (0, 2, 3)), "H100"), rel=0.02)
