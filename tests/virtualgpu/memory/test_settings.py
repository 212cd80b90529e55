"""PYTORCH_CUDA_ALLOC_CONF: read as PyTorch reads it, and its effects by hand-computed cases."""

import warnings

import pytest
import torch

from tests.virtualgpu.memory.programs import GIB, KIB, MIB
from virtualgpu.memory import config
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.config import Config, from_environment, parse

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def allocator(text: str, capacity: int = 1 << 40) -> CachingAllocator:
    return CachingAllocator(capacity, config=parse(text))


def test_which_variable_wins(environment):
    assert from_environment() == Config()
    environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:21")
    assert from_environment().max_split_size == 21 * MIB
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert from_environment() == Config(text="expandable_segments:True", expandable_segments=True)
    assert CachingAllocator(GIB).config.expandable_segments
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    assert from_environment() == Config(), "it wins even where it says nothing"


def test_memory_past_the_cache_is_refused(environment):
    environment.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(NotImplementedError, match="unset it"):
        from_environment()


def test_all_settings_at_once():
    text = (
        "max_split_size_mb:40, max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,roundup_power2_divisions:8"
    )
    settings = parse(
        text + ",expandable_segments:True,large_segment_size_mb:12,per_process_memory_fraction:0.25,backend:native"
    )
    assert (settings.max_split_size, settings.max_non_split_rounding) == (40 * MIB, 30 * MIB)
    assert (settings.garbage_collection_threshold, settings.memory_fraction) == (0.5, 0.25)
    assert settings.divisions == (8,) * 16 and settings.large_segment == 12 * MIB and settings.expandable_segments


def test_what_a_second_call_keeps():
    first = parse("expandable_segments:True,max_split_size_mb:40,large_segment_size_mb:30")
    second = parse("garbage_collection_threshold:0.5", first)
    assert second.expandable_segments and second.large_segment == 30 * MIB
    assert second.max_split_size == config.UNLIMITED


WRONG = """
foo:1 | expandable_segments:1 | expandable_segments:true | expandable_segments:True;max_split_size_mb:30 | max_split_size_mb:19
max_split_size_mb:x | large_segment_size_mb:10 | large_segment_size_mb:30,max_split_size_mb:25 | max_non_split_rounding_mb:10
large_segment_size_mb:20,max_non_split_rounding_mb:10
garbage_collection_threshold:0 | garbage_collection_threshold:1.0 | garbage_collection_threshold:abc
roundup_power2_divisions:3 | roundup_power2_divisions:0 | roundup_power2_divisions:[63:8] | roundup_power2_divisions:[64:7]
backend:foo | per_process_memory_fraction:2 | per_process_memory_fraction:-0.1 | throw_on_cudamalloc_oom:maybe
graph_capture_record_stream_reuse:1 | max_split_size_mb:30,foo:3 | :
"""
NEWER = "throw_on_cudamalloc_oom"  # than 2.11
RIGHT = """
max_split_size_mb:21 | expandable_segments : True | max_split_size_mb:30, | backend:native | pinned_use_background_threads:True
max_split_size_mb:25abc | large_segment_size_mb:12.5 | roundup_power2_divisions:[64:8,256:4,>:1] | roundup_power2_divisions:[>:4]
roundup_power2_divisions:1 | roundup_power2_divisions:[4096:2,262144:8] | garbage_collection_threshold:0.5x
release_lock_on_cudamalloc:True | per_process_memory_fraction:0.5 | max_split_size_mb:30,max_split_size_mb:40
"""


def lines(text: str) -> list[str]:
    return [part.strip() for line in text.strip().splitlines() for part in line.split("|")]


@pytest.fixture
def theirs():
    """The parser inside torch, and the settings as they were."""
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None or torch.version.cuda is None:
        pytest.skip("this PyTorch has no parser of CUDA's settings")
    yield set_settings
    set_settings("large_segment_size_mb:20,expandable_segments:False,per_process_memory_fraction:1.0")


@pytest.mark.parametrize("text", lines(WRONG))
def test_errors_are_pytorchs(text, theirs):
    theirs("large_segment_size_mb:20")
    with pytest.raises(ValueError) as error:
        theirs(text)
    if text.startswith(NEWER) and "Unrecognized key" in str(error.value):
        pytest.skip(f"PyTorch {torch.__version__} does not know {text}")
    with pytest.raises(ValueError) as ours:
        parse(text)
    assert str(ours.value) == str(error.value)


@pytest.mark.parametrize("text", lines(RIGHT))
def test_accepted_as_by_pytorch(text, theirs):
    theirs("large_segment_size_mb:20")
    theirs(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parse(text)


def test_not_modelled_says_so(environment):
    with pytest.raises(NotImplementedError, match="cudaMallocAsync is not modelled"):
        parse("backend:cudaMallocAsync")
    with pytest.raises(NotImplementedError, match="throw_on_cudamalloc_oom is not modelled"):
        parse("throw_on_cudamalloc_oom:True")


def test_settings_without_effect_warn_once(environment):
    environment.setattr(config, "_warned", set())
    with pytest.warns(UserWarning, match="pinned_num_register_threads does nothing on virtual GPUs"):
        parse("pinned_num_register_threads:8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse("pinned_num_register_threads:8")


@pytest.mark.parametrize("text", ["max_split_size_mb", "max_split_size_mb:", "roundup_power2_divisions:[64:8"])
def test_incomplete_settings(text):
    with pytest.raises(ValueError, match=r"has no value|has no closing bracket"):
        parse(text)


@pytest.mark.parametrize(
    "text, request_, allocated",
    [
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),  # 1024, 1280, 1536, 1792: the source's own example
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB),
        ("roundup_power2_divisions:4", 2048, 2048),  # no more than 512 bytes a division: by 512 as ever
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:1", 1200 * KIB + 1, 1200 * KIB + 512),
        ("roundup_power2_divisions:[2:2,>:0]", 3 * MIB + 1, 4 * MIB),  # sizes from 2 to 4 MiB: halves
        ("roundup_power2_divisions:[2:2,>:0]", 5 * MIB + 1, 5 * MIB + 512),
        ("roundup_power2_divisions:[2:2,>:0]", 600 * KIB, 768 * KIB),  # below the first boundary: its divisions
    ],
)
def test_rounding_to_divisions(text, request_, allocated):
    memory = allocator(text)
    memory.malloc(request_)
    assert memory.allocated == allocated


def test_large_segments_of_another_size():
    memory = allocator("large_segment_size_mb:30")
    memory.malloc(2 * MIB)
    assert memory.reserved == 30 * MIB


def test_a_fraction_from_the_environment():
    memory = allocator("per_process_memory_fraction:0.5", 100 * MIB)
    assert memory.limit == 50 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"50.00 MiB allowed"):
        memory.malloc(60 * MIB)


def test_large_blocks_are_not_split():
    """max_split_size: a block from that size on serves only requests from that size on, up to 20 MiB smaller than
    it."""
    memory = allocator("max_split_size_mb:40")
    memory.free(memory.malloc(100 * MIB))
    figures = memory.statistics.nested()
    assert figures["max_split_size"] == 40 * MIB and figures["oversize_segments"]["current"] == 1
    assert figures["oversize_allocations"] == {"current": 0, "peak": 1, "allocated": 1, "freed": 1}
    assert memory.malloc(30 * MIB).size == 30 * MIB and memory.reserved == 130 * MIB, "too small a request"
    assert memory.malloc(80 * MIB).size == 80 * MIB and memory.reserved == 210 * MIB, "100 is 20 more than 80"
    assert memory.malloc(80 * MIB + 512).size == 100 * MIB and memory.reserved == 210 * MIB


def test_too_large_blocks_go_first_when_memory_runs_out():
    """Only as much as is needed is given back, and the cache stays."""
    memory = allocator("max_split_size_mb:40", 300 * MIB)
    for block in [memory.malloc(size * MIB) for size in (30, 50, 60, 100)]:
        memory.free(block)
    memory.malloc(70 * MIB)
    assert memory.statistics.nested()["num_device_free"] == 1
    assert memory.reserved == 210 * MIB, "the 100 MiB that may not serve 70 went"
    memory.malloc(105 * MIB)
    assert memory.reserved == (30 + 70 + 106) * MIB, "60 and 50 went, the largest first"
    assert memory.statistics.retries == 0


@pytest.mark.parametrize("fraction, reserved", [(0.5, 82), (1.0, 96)])
def test_garbage_collection_needs_a_fraction(fraction, reserved):
    """Above the threshold, segments go that were not used for longer than the mean; without a fraction it does
    nothing."""
    memory = allocator(f"garbage_collection_threshold:0.6,per_process_memory_fraction:{fraction}", 200 * MIB)
    for block in [memory.malloc(size * MIB) for size in (12, 14, 40)]:
        memory.free(block)
    memory.free(memory.malloc(12 * MIB))
    memory.malloc(40 * MIB)
    assert memory.reserved == 66 * MIB
    memory.malloc(30 * MIB)  # 66 MiB are more than 0.6 of 100: those of 14 go, which were not used since; 12 stay
    assert (memory.reserved, memory.statistics.retries) == (reserved * MIB, 0)


def test_garbage_of_the_same_age_goes_together():
    memory = allocator("garbage_collection_threshold:0.6,per_process_memory_fraction:0.5", 200 * MIB)
    for block in [memory.malloc(size * MIB) for size in (32, 34)]:
        memory.free(block)
    memory.malloc(30 * KIB)  # of the small pool: served by a segment of its own
    assert memory.reserved == 2 * MIB and memory.statistics.retries == 0
