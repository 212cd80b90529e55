"""torch.cuda and torch.accelerator: what a GPU says of itself, how busy it was, its streams, its versions."""

import dataclasses
import threading
import uuid

import pytest
import torch

import virtualgpu

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")


def test_properties(gpus):
    properties = torch.cuda.get_device_properties(1)
    assert (properties.name, properties.major, properties.minor) == ("Tesla T4", 7, 5)
    assert (properties.multi_processor_count, properties.warp_size) == (40, 32)
    assert properties.total_memory == torch.cuda.mem_get_info(1)[1] and isinstance(properties.L2_cache_size, int)
    assert uuid.UUID(str(properties.uuid)) != uuid.UUID(str(torch.cuda.get_device_properties(0).uuid))
    assert properties.max_threads_per_multi_processor == 1024  # compute capability 7.5, CUDA C++ Programming Guide
    for text in ("Tesla T4", "major=7", "minor=5", "multi_processor_count=40"):
        assert text in repr(properties)
    with pytest.raises(AttributeError, match="no_such_thing"):
        properties.no_such_thing  # noqa: B018


@pytest.mark.parametrize("device", [lambda: 1, lambda: "cuda:1", lambda: ONE, lambda: torch.cuda.device(1)])
def test_every_way_to_name_a_gpu(gpus, device):
    kept = torch.ones(1 << 20, device=ONE)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "memory_stats", "mem_get_info"):
        if name != "mem_get_info" or not isinstance(
            device(), torch.cuda.device
        ):  # PyTorch's own does not take it there
            assert getattr(torch.cuda, name)(device()) == getattr(torch.cuda, name)(1) != getattr(torch.cuda, name)(0)
    assert torch.cuda.get_device_name(device()) == "Tesla T4" and torch.cuda.get_device_capability(device()) == (7, 5)
    del kept


def test_names_of_modules_that_programs_import(gpus):
    """PyTorch's own Python code runs on the virtual driver."""
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.backends.cuda.is_built()
    assert torch.cuda.get_arch_list() == ["sm_75"] and not torch.cuda.is_bf16_supported(including_emulation=False)
    assert not torch.cuda.can_device_access_peer(0, 1)  # two T4s
    virtualgpu.gpus(2, like="A100")
    assert torch.cuda.can_device_access_peer(0, 1) and not torch.cuda.can_device_access_peer(1, 1)
    virtualgpu.gpus(2)
    assert torch.cuda.current_blas_handle() == 0
    with torch.cuda.device_of(torch.ones(1, device=ONE)):
        assert torch.cuda.current_device() == 1
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_device_module("cuda") is torch.cuda and torch.cuda.is_initialized()
    types = torch.accelerator.get_device_capability("cuda:0")["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool} <= types
    assert not [kind for kind in types if isinstance(kind, str)]


def test_versions_are_of_one_wheel(gpus):
    major, minor = map(int, torch.version.cuda.split("."))
    assert torch._C._cuda_getCompiledVersion() == 1000 * major + 10 * minor
    assert torch.cuda.nccl.version() >= (2, 28) and torch.backends.cudnn.version() >= 91000
    assert torch.backends.cudnn.is_available()
    with torch.backends.cudnn.flags(enabled=False, benchmark_limit=5):
        assert not torch.backends.cudnn.enabled


# -- how busy it was: shares of simulated time, and the data sheet's figures


def works():
    """The GPU works for some time, and the host waits for it."""
    with virtualgpu.dry_run():
        x = torch.ones(8192, 8192, device="cuda")
        for _ in range(10):
            x = x @ x
    torch.cuda.synchronize()


def test_each_figure_has_its_own_time_since_it_was_asked():
    virtualgpu.gpus(1, like="A100")
    spec = virtualgpu.SPECS["A100"]
    assert torch.cuda.clock_rate() == spec.clock_rate // 1000 == 1410
    assert torch.cuda.power_draw() == 0
    works()
    assert torch.cuda.power_draw("cuda:0") == pytest.approx(1000 * spec.power, rel=0.02)
    assert torch.cuda.utilization() > 95 and torch.cuda.memory_usage(0) > 95
    assert torch.cuda.utilization() == 0
    with pytest.raises(NotImplementedError, match="not modelled"):
        torch.cuda.temperature()
    virtualgpu.gpus(1, like=dataclasses.replace(spec, power=None))
    with pytest.raises(NotImplementedError, match="does not say its power limit"):
        torch.cuda.power_draw()


# -- streams keep nothing of the threads that enter them


def test_two_threads_in_one_stream(gpus):
    """Each comes back to where it was before, whichever leaves first."""
    shared, own = torch.cuda.Stream(0), torch.cuda.Stream(0)
    inside, leave, found = threading.Event(), threading.Event(), []

    def other():
        torch.cuda.set_device(1)
        with torch.cuda.stream(own):
            shared.__enter__()
            inside.set()
            leave.wait(10)
            shared.__exit__(None, None, None)
            found.append((torch.cuda.current_device(), torch.cuda.current_stream(0)))

    thread = threading.Thread(target=other)
    default = torch.cuda.current_stream(0)
    shared.__enter__()
    thread.start()
    inside.wait(10)
    shared.__exit__(None, None, None)
    assert (torch.cuda.current_device(), torch.cuda.current_stream(0)) == (0, default)
    leave.set()
    thread.join()
    assert found == [(0, own)]


def test_one_stream_entered_twice_and_priorities(gpus):
    stream = torch.cuda.Stream(1)
    with stream:
        with stream:
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == 0
    assert torch.cuda.Stream.priority_range() == (0, -3)  # those of PyTorch's pools
    assert [torch.cuda.Stream(priority=p).priority for p in (2, 0, -1, -3, -9)] == [0, 0, -1, -3, -3]
    assert torch.cuda.default_stream().priority == 0
