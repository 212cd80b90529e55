"""DLPack: a tensor on a virtual GPU stays on it, shares its memory, and is nobody's on the CPU."""

import pytest
import torch
from torch.utils import dlpack

import virtualgpu

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(2)


WAYS = {
    "the tensor": torch.from_dlpack,
    "a capsule": lambda tensor: torch.from_dlpack(dlpack.to_dlpack(tensor)),
    "torch.to_dlpack": lambda tensor: torch.from_dlpack(torch.to_dlpack(tensor)),
    "a versioned capsule": lambda tensor: torch.from_dlpack(tensor.__dlpack__(max_version=(1, 0))),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_stays_on_its_gpu_and_shares_memory(way):
    with torch.cuda.device(1):
        there = torch.zeros(1024, device="cuda:1")
        same = WAYS[way](there[512:])
    assert same.device == torch.device("cuda:1")
    assert same.data_ptr() == there.data_ptr() + 2048
    assert torch.cuda.memory_allocated(1) == 4096
    same += 1
    assert there.sum().item() == 512


def test_the_memory_is_free_when_both_have_gone():
    there = torch.zeros(1024, device="cuda")
    same = torch.from_dlpack(there)
    del there
    assert torch.cuda.memory_allocated() == 4096
    assert same.sum().item() == 0
    del same
    assert torch.cuda.memory_allocated() == 0


def test_a_capsule_that_nobody_takes():
    capsule = dlpack.to_dlpack(torch.zeros(1024, device="cuda"))
    assert torch.cuda.memory_allocated() == 4096
    del capsule
    assert torch.cuda.memory_allocated() == 0


def test_numpy_refuses_it():
    there = torch.zeros(3, device="cuda")
    with pytest.raises((BufferError, RuntimeError), match=r"[Dd]evice"):
        np.from_dlpack(there)


def test_of_the_cpu_as_ever():
    here = torch.zeros(3)
    assert np.from_dlpack(here).shape == (3,)
    assert torch.from_dlpack(np.ones(2)).device.type == "cpu"
    same = torch.from_dlpack(here)
    same += 1
    assert here.tolist() == [1, 1, 1]


def test_copies_to_other_places():
    here = torch.ones(3)
    there = torch.from_dlpack(here, device="cuda:0")
    assert there.device == torch.device("cuda:0")
    assert torch.from_dlpack(there, device="cpu").tolist() == [1, 1, 1]
    copied = torch.from_dlpack(there, copy=True)
    copied += 1
    assert there.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(there, device="cpu", copy=False)


def test_another_gpu_has_to_be_current():
    with pytest.raises(BufferError, match="different CUDA device index"):
        torch.from_dlpack(torch.ones(3, device="cuda:1"))


def test_a_dry_run_has_nothing_to_export():
    with virtualgpu.dry_run(), pytest.raises(BufferError, match="outside dry_run"):
        torch.from_dlpack(torch.ones(3, device="cuda"))
