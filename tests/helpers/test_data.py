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
        data.digits(tmp_path)


def test_printed_digits():
    images, labels = data.printed_digits(copies=50)
    assert images.shape == (500, 1, 8, 8) and labels.shape == (500,)
    assert images.min() >= 0 and torch.allclose(images.amax((1, 2, 3)), torch.ones(500))
    assert labels.unique().tolist() == list(range(10))
    again, other = data.printed_digits(copies=50), data.printed_digits(copies=50, seed=1)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    assert not torch.equal(images, other[0])


def test_printed_digits_leave_the_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    data.printed_digits(copies=5)
    assert torch.equal(before, torch.get_rng_state())


def test_photos():
    images, names = data.photos()
    assert images.shape == (6, 1, 320, 320) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1 and images.std((1, 2, 3)).min() > 0.05
    assert names == ["brick", "grass", "gravel", "cat", "coffee", "temple"]


def test_the_shipped_photographs_are_those_that_the_script_makes():
    found = hashlib.sha256((data.DATA / "photos.npz").read_bytes()).hexdigest()
    assert found == "2d72fce13290daff6e6acbbeb3fa971e37a4c990967af066182ec27f3df5bff3"


def test_each_shipped_file_has_its_origin_and_licence():
    """README.md names each, and git keeps it."""
    said = (data.DATA / "README.md").read_text("utf-8")
    ignored = (data.DATA.parent / ".gitignore").read_text("utf-8")
    for name in ("digits.npz", "photos.npz", "efficientnet_lite0_lower.safetensors", "LICENSE-efficientnet"):
        assert data.shipped(name).stat().st_size < 600_000, "small: everybody who clones the series fetches it"
        assert name in said and f"!data/{name}" in ignored


def test_a_shipped_file_that_is_missing_names_its_script(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"clone it whole, or run data/make_photos.py"):
        data.photos(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"or run data/make_efficientnet.py"):
        data.shipped("efficientnet_lite0_lower.safetensors", tmp_path)
