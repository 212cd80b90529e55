"""Convolutions of 3x3 in single precision before Hopper: the three ways of cuDNN, and others' figures that nothing was fitted to."""

import math
from statistics import median
from unittest import mock

import pytest
import torch

from tests.accuracy import convolutions as convolved
from tests.accuracy.kernels import within
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import winograd
from virtualgpu.timing.convolutions import backward_seconds, forward_seconds
from virtualgpu.timing.kernels import Kernels

V100, A100 = Kernels(SPECS["V100-32GB"]), Kernels(SPECS["A100"])


def images(batch, read, made, size):
    """What is made, and what is read."""
    return torch.empty(batch, made, size, size, device="meta"), torch.empty(batch, read, size, size, device="meta")


def microseconds(kernels, direction, image, weight, key="float32", stride=1, dilation=1, transposed=False):
    setting = [stride] * 2, [1, 1], [dilation] * 2, transposed, [0, 0], 1
    made = torch.ops.aten.convolution(image, weight, None, *setting)
    moved = image.nbytes + weight.nbytes + made.nbytes
    if direction == "forward":
        return 1e6 * forward_seconds(kernels, (image, weight, None, *setting), (image, weight, made), 0, moved, key)
    mask = [direction == "image", direction == "weight", False]
    return 1e6 * backward_seconds(kernels, (made, image, weight, None, *setting, mask), (), 0, 0, key)


@pytest.mark.parametrize(
    "wide, size, forward, image",
    [(64, 56, 353, 361.5), (128, 28, 306, 294), (256, 14, 290, 283), (512, 7, 309.5, 300)],
)
def test_a_resnet_50_on_a_v100(wide, size, forward, image):
    """kineto's traces, batch 32 (tests/accuracy/convolutions.csv): it was no part of the fits."""
    x, weight = torch.empty(32, wide, size, size, device="meta"), torch.empty(wide, wide, 3, 3, device="meta")
    assert microseconds(V100, "forward", x, weight) == pytest.approx(forward, rel=0.3)
    assert microseconds(V100, "image", x, weight) == pytest.approx(image, rel=0.3)


def test_it_takes_the_way_that_traces_name():
    """The same: tile148t for the largest images, four kernels for the others; and with 12 channels scudnn_128x64 (NeuSight, A100)."""
    for wide, size, way in ((64, 56, winograd._in_one), (256, 14, winograd._in_four), (512, 7, winograd._in_four)):
        ways = {one: one(V100, *images(32, wide, wide, size)) for one in (winograd._in_one, winograd._in_four)}
        assert min(ways, key=ways.get) is way
    few = images(62, 12, 848, 34)
    assert winograd._directly(A100, *few) < min(winograd._in_one(A100, *few), winograd._in_four(A100, *few))


def test_what_others_timed():
    """NeuSight's, of a quarter of the shapes that nothing was fitted to, and DeepBench's 3x3 forward on a V100."""
    found = [one for one in convolved.convolutions() if one.dtype == "float32" and one.direction == "forward"]
    for card in ("A100-PCIE-80GB", "V100"):
        logs = [one.log for one in found if one.source == "sitar-lab/NeuSight" and one.card == card]
        assert len(logs) == 60 and abs(median(logs)) < math.log(1.1) and within(logs, 30) > 0.85
    logs = [one.log for one in found if (one.source, one.card, one.kind) == ("baidu-research/DeepBench", "V100", "3x3")]
    assert len(logs) >= 8 and within(logs, 30) > 0.7


def test_a_block_more_than_the_processors_is_a_round_more():
    """80 of 1 image, 8 x 16 places and 32 channels are one round of a V100."""
    full, more = (winograd._in_one(V100, *images(batch, 512, 32, 8)) for batch in (80, 81))
    assert 1.8 < more / full < 2.1


def test_channels_that_are_no_multiple_of_a_sector_cost_more():
    """The weight is written for the products of 500 channels in whole sectors but for the last, of 501 one by one."""
    aligned, odd = (winograd._in_four(V100, *images(8, channels, 1024, 8)) for channels in (512, 511))
    assert odd > 1.1 * aligned


def test_others_go_by_their_own_rules():
    """Other strides and dilations, transposed ones, gradients of the weight, TF32, Hoppers, and the data sheet's peak."""
    image, weight = torch.empty(8, 64, 28, 28, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    with mock.patch.object(winograd, "seconds", side_effect=AssertionError):
        microseconds(V100, "forward", image, weight, stride=2)
        microseconds(V100, "image", image, weight, dilation=2)
        microseconds(V100, "forward", image, weight, transposed=True)
        microseconds(V100, "weight", image, weight)
        microseconds(A100, "forward", image, weight, key="tf32")
        for card in ("H100", "T4", "P100"):
            microseconds(Kernels(SPECS[card]), "forward", image, weight)
        microseconds(Kernels(SPECS["V100"], peak=True), "forward", image, weight)
        with pytest.raises(AssertionError):
            microseconds(V100, "forward", image, weight, key="tf32")  # which it has not
