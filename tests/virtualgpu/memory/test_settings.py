"""PYTORCH_CUDA_ALLOC_CONF: read as PyTorch reads it. What it does: test_allocator."""

import warnings

import pytest
import torch

from tests.virtualgpu.memory.programs import GIB, MIB
from virtualgpu.memory import config
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.config import Config, from_environment, parse

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_which_variable_wins(environment):
    assert from_environment() == Config()
    environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:21")
    assert from_environment().max_split_size == 21 * MIB
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,per_process_memory_fraction:0.5")
    memory = CachingAllocator(GIB)
    assert memory.config == from_environment() and memory.config.expandable_segments and memory.limit == GIB // 2
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    assert from_environment() == Config(), "it wins even where it says nothing"


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
    environment.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(NotImplementedError, match="unset it"):
        from_environment()
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
