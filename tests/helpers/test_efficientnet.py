"""The lower half of EfficientNet-Lite0: the shipped weights fit, and the layers compute what TensorFlow's padding asks for."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from helpers import data

PATH = data.DATA / "efficientnet_lite0_lower.safetensors"
FEATURES = 80


def lower_half():
    """As lesson 01 builds it."""
    return torch.hub.load(str(data.DATA), "efficientnet_lite0_lower", source="local")


Block = type(lower_half()[-1])


@pytest.fixture(scope="module")
def trained():
    model = lower_half()
    model.load_state_dict(load_file(PATH))
    return model.eval()


def test_the_shipped_file_says_what_it_is():
    with safe_open(PATH, "pt") as file:
        said = file.metadata()
    assert said["licence"] == "Apache-2.0" and "EfficientNet-Lite0" in said["model"]


def test_shapes(trained):
    assert trained(torch.zeros(2, 3, 64, 64)).shape == (2, FEATURES, 4, 4)
    assert trained(torch.zeros(1, 3, 50, 33)).shape == (1, FEATURES, 4, 3), "rounded up, as TensorFlow's SAME"


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("length", [8, 9])
def test_a_stride_of_two_pads_at_the_end(kernel, length):
    """TensorFlow's SAME: of an odd number of zeros, the larger half stands behind."""
    block = Block(4, 6, kernel, 2, 1).eval()
    x = torch.randn(1, 4, length, length)
    missing = (-(-length // 2) - 1) * 2 + kernel - length
    padded = F.pad(x, [missing // 2, missing - missing // 2] * 2)
    each, norm, relu, narrow, last = block.layers
    wanted = F.conv2d(padded, each.weight, stride=2, groups=4)
    wanted = last(F.conv2d(relu(norm(wanted)), narrow.weight))
    assert torch.equal(block(x), wanted)


def test_the_way_around_a_block():
    assert Block(8, 8, 3, 1, 6).around and not Block(8, 8, 3, 2, 6).around and not Block(8, 16, 3, 1, 6).around


def test_it_was_trained(trained):
    """Its features tell one photograph from another; those of random weights hardly do."""
    x = 2 * data.hands()[0][:10] - 1

    def alike(model):
        with torch.no_grad():
            features = model(x).mean((2, 3))
        return F.cosine_similarity(features[:1], features[1:]).mean().item()

    torch.manual_seed(0)
    assert alike(trained) < alike(lower_half().eval()) - 0.01
