"""The images: shapes, ranges, and the shipped file's bytes."""

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
