"""The images: shapes, ranges, and the shipped files' bytes and origins."""

import hashlib

import pytest
import torch

from helpers import data


def test_digits():
    images, labels = data.digits()
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (1797,) and labels.dtype == torch.int64
    assert images.min() == 0 and images.max() == 1
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], (
        "as the UCI page counts them"
    )


def test_the_shipped_file_is_the_one_that_the_script_makes():
    """Its digest, noted when data/make_digits.py wrote it: a change of the data is a change of every stored output."""
    found = hashlib.sha256((data.DATA / "digits.npz").read_bytes()).hexdigest()
    assert found == "78a85852f7f6b2b5d209ab9b246a3f6783ba99bf264099704d8725980b7e0b97"


def test_digits_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="clone it whole"):
        data.digits(folder=tmp_path)


def test_hands():
    """A row of ten is a student, and the sheet is cut where it was put together."""
    images, signs = data.hands()
    assert images.shape == (600, 3, 64, 64) and images.dtype == torch.float32
    assert signs.tolist() == 60 * list(range(10))
    assert images.min() >= 0 and images.max() <= 1 and images.std((1, 2, 3)).min() > 0.02


def test_the_photographs_are_those_that_the_script_makes():
    found = hashlib.sha256((data.DATA / "hands.jpg").read_bytes()).hexdigest()
    assert found == "41effd2951aa9be4c42e662e68c48dc94090d7fdeca3b263d1036b7f2f7e2b10"


def test_each_shipped_file_has_its_origin_and_licence():
    """README.md names each, and git keeps it."""
    said = (data.DATA / "README.md").read_text("utf-8")
    ignored = (data.DATA.parent / ".gitignore").read_text("utf-8")
    for name in (
        "digits.npz",
        "tuning.npz",
        "hands.jpg",
        "efficientnet_lite0_lower.safetensors",
        "LICENSE-efficientnet",
    ):
        assert data.shipped(name).stat().st_size < 600_000, "small: everybody who clones the series fetches it"
        assert name in said and f"!data/{name}" in ignored


def test_a_shipped_file_that_is_missing_names_its_script(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"clone it whole, or run data/make_hands.py"):
        data.hands(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"or run data/make_efficientnet.py"):
        data.shipped("efficientnet_lite0_lower.safetensors", tmp_path)
