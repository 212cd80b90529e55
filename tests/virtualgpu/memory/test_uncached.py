"""torch.cuda.caching_allocator_enable(False): memory straight from the GPU, which PyTorch's figures do not count."""

import pytest
import torch

import virtualgpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpus():
    virtualgpu.gpus(1, memory="2 GB")
    torch.cuda.init()  # before that, PyTorch does not pass the setting on


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def test_tensors_leave_no_trace_in_the_figures():
    torch.ones(1, device="cuda")
    before, torch_before = free(), torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    torch.cuda.caching_allocator_enable(False)
    assert not torch._C._cuda_cudaCachingAllocator_is_enabled()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert free() == before - 3 * MIB
    assert torch.cuda.memory_stats()["requested_bytes.all.allocated"] == torch_before
    del x
    assert free() == before, "at once"


def test_blocks_from_before_and_after_go_back_where_they_came_from():
    torch.cuda.caching_allocator_enable(False)
    uncached = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.caching_allocator_enable(True)
    cached = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 3 * MIB
    before = free()
    uncached.record_stream(torch.cuda.Stream())
    del uncached
    assert (free(), torch.cuda.memory_allocated()) == (before + 3 * MIB, 3 * MIB)
    torch.cuda.caching_allocator_enable(False)
    del cached
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == 20 * MIB


def test_a_full_gpu_is_cudas_own_error():
    torch.cuda.caching_allocator_enable(False)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")


def test_the_variable_says_it_for_all_of_a_program(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    virtualgpu.reset()
    virtualgpu.gpus(1)
    x = torch.ones(1000, device="cuda")
    assert (x.sum().item(), torch.cuda.memory_reserved()) == (1000, 0)
