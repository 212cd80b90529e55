"""What PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF asks of the allocator.

The first of the two wins where it is set, even to nothing (c10/core/AllocatorConfig.cpp). What can change a figure is
modelled or refused; what cannot (how pinned memory is made, what a CUDA graph reuses) is known, and a warning says once
that it does nothing. Wrong settings raise PyTorch's own ValueError.

Sources: c10/core/AllocatorConfig.{h,cpp}, c10/cuda/CUDAAllocatorConfig.{h,cpp}; tests compare with the parser inside
torch.
"""

import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from virtualgpu.memory.blocks import LARGE_SEGMENT, MIN_BLOCK, MIN_LARGE, round_size

MIB = 1 << 20
INTERVALS = 16  # of roundup_power2_divisions: from 1 MiB to 64 GiB
WHOLE = (0,) * INTERVALS  # no power of two is divided
UNLIMITED = math.inf  # the default of max_split_size_mb

BOOLEAN = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)
IGNORED = (  # they change no figure of a GPU's memory, nor the simulated time
    *BOOLEAN,
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
)
UNCACHED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_warned: set[str] = set()


@dataclass(frozen=True)
class Config:
    """The settings, in bytes. max_split_size: `UNLIMITED` unless set. divisions: of each power of two, 0 or 1 for
    none."""

    text: str = ""  # as it was written
    expandable_segments: bool = False
    max_split_size: float = UNLIMITED
    max_non_split_rounding: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    divisions: tuple[int, ...] = WHOLE
    large_segment: int = LARGE_SEGMENT
    memory_fraction: float = 1.0  # per_process_memory_fraction

    @property
    def plain(self) -> bool:
        """Does malloc take the smallest free block that fits, as rounded to 512 bytes, and never look at its age?"""
        usual = self.divisions == WHOLE and self.max_split_size == UNLIMITED
        return usual and not self.expandable_segments and not self.garbage_collection_threshold

    def round_size(self, nbytes: int) -> int:
        """A request rounded up: to 512 bytes, or to a division of its power of two."""
        if self.divisions is not WHOLE and nbytes >= MIN_BLOCK:
            divisions = self.divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]
            if divisions > 1 and nbytes > MIN_BLOCK * divisions:
                step = (1 << (nbytes.bit_length() - 1)) // divisions
                return -(-nbytes // step) * step
        return round_size(nbytes)


def from_environment() -> Config:
    """The settings of this process. Raises ValueError for wrong ones, NotImplementedError for what is not modelled."""
    for name in UNCACHED:
        if os.environ.get(name) == "1":
            raise NotImplementedError(f"memory past the cache ({name}=1) is not modelled on virtual GPUs: unset it")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in os.environ:
            return parse(os.environ[name])
    return Config()


def parse(text: str, before: Config | None = None) -> Config:
    """`key:value,key:value`. Of the settings `before`, those that PyTorch does not reset stay.

    Raises ValueError in PyTorch's words; NotImplementedError for what is known and not modelled.
    """
    kept = before or Config()
    config = Config(
        text=text,
        expandable_segments=kept.expandable_segments,
        max_non_split_rounding=kept.max_non_split_rounding,
        large_segment=kept.large_segment,
        memory_fraction=kept.memory_fraction,
    )
    for key, value, index in _pairs(text):
        config = _set(config, key, value, index)
    return config


def _set(config: Config, key: str, value: str | list[str], index: int) -> Config:
    if key == "expandable_segments":
        return replace(config, expandable_segments=_bool(value, index))
    if key == "large_segment_size_mb":
        size = _size(value) * MIB
        if size <= MIN_LARGE:
            raise ValueError("CachingAllocator option large_segment_size_mb must be > 10 MB")
        return replace(config, large_segment=size)
    if key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        size, least = _size(value) * MIB, config.large_segment
        if size < least:
            raise ValueError(f"CachingAllocator option {key} too small, must be >= {least // MIB}")
        if key == "max_split_size_mb":
            return replace(config, max_split_size=size)
        return replace(config, max_non_split_rounding=size)
    if key == "garbage_collection_threshold":
        threshold = _double(value)
        if not 0 < threshold < 1:
            raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
        return replace(config, garbage_collection_threshold=threshold)
    if key == "roundup_power2_divisions":
        return replace(config, divisions=_divisions(config.divisions, value))
    if key == "per_process_memory_fraction":
        fraction = _double(value)
        if not 0 <= fraction <= 1:
            raise ValueError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
        return replace(config, memory_fraction=fraction)
    _refuse(key, value, index)
    return config


def _refuse(key: str, value: str | list[str], index: int) -> None:
    """What is not modelled: an error where it would change figures, otherwise one warning."""
    if key == "backend":
        if value not in ("native", "cudaMallocAsync"):
            raise ValueError("Unknown allocator backend, options are native and cudaMallocAsync")
        if value == "cudaMallocAsync":
            raise NotImplementedError(
                "backend:cudaMallocAsync is not modelled: virtual GPUs have PyTorch's native allocator. Use backend:native"
            )
    elif key == "throw_on_cudamalloc_oom":
        if _bool(value, index):
            raise NotImplementedError("throw_on_cudamalloc_oom is not modelled on virtual GPUs. Leave it out")
    elif key not in IGNORED:
        raise ValueError(f"Unrecognized key '{key}' in Accelerator allocator config.")
    else:
        if key in BOOLEAN:
            _bool(value, index)
        if key not in _warned:
            _warned.add(key)
            warnings.warn(f"allocator setting {key} does nothing on virtual GPUs", stacklevel=2)


def _pairs(text: str) -> Iterator[tuple[str, str | list[str], int]]:
    """Keys with their values, and where among the tokens the value is. A value in brackets is a list of tokens."""
    tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))
    index = 0
    while index < len(tokens):
        key, index = tokens[index], index + 2
        if key in ":,[]":
            raise ValueError(f"Unrecognized key '{key}' in Accelerator allocator config.")
        if index >= len(tokens) or tokens[index - 1] != ":":
            raise ValueError(f"allocator setting {key!r} has no value: write {key}:value")
        value: str | list[str] = tokens[index]
        start = index
        if value == "[":
            if "]" not in tokens[index:]:
                raise ValueError(f"the list of allocator setting {key!r} has no closing bracket")
            index = tokens.index("]", index)
            value = tokens[start + 1 : index]
        yield key, value, start
        index += 1
        if index < len(tokens) and tokens[index] != ",":
            raise ValueError(f"expected a comma after allocator setting {key!r}, not {tokens[index]!r}")
        index += 1


def _bool(value: str | list[str], index: int) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"Expected 'True' or 'False' at index {index} in ConfigTokenizer but got '{value}'")
    return value == "True"


def _size(value: str | list[str]) -> int:
    digits = re.match(r"\d+", value) if isinstance(value, str) else None
    if digits is None:
        raise ValueError("stoull")  # PyTorch's whole message
    return int(digits[0])


def _double(value: str | list[str]) -> float:
    number = re.match(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.I) if isinstance(value, str) else None
    if number is None:
        raise ValueError("stod")  # PyTorch's whole message
    return float(number[0])


def _divisions(before: tuple[int, ...], value: str | list[str]) -> tuple[int, ...]:
    """One number for all sizes, or `boundary in MiB:divisions` for the sizes up to each boundary, with > for those
    above."""
    if isinstance(value, str):
        if (number := _size(value)).bit_count() != 1:
            raise ValueError("For roundups, the divisions has to be power of 2 ")
        return (number,) * INTERVALS
    divisions, last, first = list(before), 0, True
    for item in "".join(value).split(","):
        boundary, _, count = item.partition(":")
        if (number := _size(count)).bit_count() > 1:
            raise ValueError("For roundups, the divisions has to be power of 2 or 0 to disable roundup ")
        if boundary == ">":
            divisions[last + 1 :] = [number] * (INTERVALS - last - 1)
            continue
        if (size := _size(boundary)).bit_count() != 1:
            raise ValueError("For roundups, the intervals have to be power of 2 ")
        last = min(size.bit_length() - 1, INTERVALS - 1)
        if first:
            divisions[:last] = [number] * last
            first = False
        divisions[last] = number
    return tuple(divisions)
