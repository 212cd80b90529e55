"""What is shipped: shapes, ranges, bytes and origins of the images, and the lower half of EfficientNet-Lite0."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from helpers import data

WEIGHTS = "efficientnet_lite0_lower.safetensors"


def test_digits():
    images, labels = data.digits()
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (1797,) and labels.dtype == torch.int64
    assert images.min() == 0 and images.max() == 1
    as_the_uci_page_counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels.bincount().tolist() == as_the_uci_page_counts


def test_hands():
    """A row of ten is a student, and the sheet is cut where it was put together."""
    images, signs = data.hands()
    assert images.shape == (600, 3, 64, 64) and images.dtype == torch.float32
    assert signs.tolist() == 60 * list(range(10))
    assert images.min() >= 0 and images.max() <= 1 and images.std((1, 2, 3)).min() > 0.02


@pytest.mark.parametrize("name, digest", [
    ("digits.npz", "78a85852f7f6b2b5d209ab9b246a3f6783ba99bf264099704d8725980b7e0b97"),
    ("hands.jpg", "41effd2951aa9be4c42e662e68c48dc94090d7fdeca3b263d1036b7f2f7e2b10"),
    ("tuning.npz", None),
    (WEIGHTS, None),
    ("LICENSE-efficientnet", None),
])  # fmt: skip
def test_each_shipped_file_has_its_origin_and_licence(name, digest):
    """README.md names it, and git keeps it. digest: as its script wrote it; a change of the data is a change of every stored output."""
    content = data.shipped(name).read_bytes()
    assert len(content) < 600_000, "small: everybody who clones the series fetches it"
    assert digest in (None, hashlib.sha256(content).hexdigest())
    assert name in (data.DATA / "README.md").read_text("utf-8")
    assert f"!data/{name}" in (data.DATA.parent / ".gitignore").read_text("utf-8")


def test_a_shipped_file_that_is_missing_names_its_script(tmp_path):
    for load, script in (
        (data.digits, "digits"),
        (data.hands, "hands"),
        (lambda at: data.shipped(WEIGHTS, at), "efficientnet"),
    ):
        with pytest.raises(FileNotFoundError, match=f"clone it whole, or run data/make_{script}.py"):
            load(tmp_path)


def lower_half():
    """As lesson 01 builds it."""
    return torch.hub.load(str(data.DATA), "efficientnet_lite0_lower", source="local")


Block = type(lower_half()[-1])


def test_the_lower_half_was_trained():
    """Its features tell one photograph from another; those of random weights hardly do."""
    path = data.DATA / WEIGHTS
    with safe_open(path, "pt") as file:
        said = file.metadata()
    assert said["licence"] == "Apache-2.0" and "EfficientNet-Lite0" in said["model"]
    x = 2 * data.hands()[0][:10] - 1

    def alike(model):
        with torch.no_grad():
            features = model(x)
        assert features.shape == (10, 80, 4, 4)
        features = features.mean((2, 3))
        return F.cosine_similarity(features[:1], features[1:]).mean().item()

    torch.manual_seed(0)
    trained, random = lower_half(), lower_half()
    trained.load_state_dict(load_file(path))
    assert alike(trained.eval()) < alike(random.eval()) - 0.01


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
    assert Block(8, 8, 3, 1, 6).around and not Block(8, 8, 3, 2, 6).around and not Block(8, 16, 3, 1, 6).around
