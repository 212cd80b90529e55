"""expandable_segments:True, by hand-computed cases and under random programs. Pages: 2 MiB for small blocks, 20 MiB for
large ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtualgpu.memory.programs import GIB, KIB, MIB, STEPS, Program, Time, check
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.config import Config

ON = Config(expandable_segments=True)


def allocator(capacity: int = GIB, **keywords) -> CachingAllocator:
    return CachingAllocator(capacity, config=ON, **keywords)


def test_segments_grow_by_pages():
    memory = allocator()
    memory.malloc(25 * MIB)
    assert (memory.allocated, memory.reserved) == (25 * MIB, 40 * MIB), (
        "two pages, and nothing of it is lost to rounding"
    )
    second = memory.malloc(30 * MIB)
    assert memory.reserved == 60 * MIB, "15 MiB were left, one more page is enough"
    assert second.address == memory.all_blocks()[0].address + 25 * MIB
    memory.malloc(100)
    assert memory.reserved == 62 * MIB
    figures = memory.statistics.nested()
    assert figures["segment"]["all"]["allocated"] == 0, "PyTorch does not count them as segments"
    assert figures["inactive_split"]["all"]["allocated"] == 0
    assert figures["num_device_alloc"] == 3


def test_growing_batches_leave_no_slivers():
    """PyTorch's own example: batch N, then N + 1. With segments of fixed size the first one lies idle."""
    fixed, expandable = CachingAllocator(GIB), allocator()
    for memory in (fixed, expandable):
        for size in (100, 120, 140):
            memory.free(memory.malloc(size * MIB))
    assert fixed.reserved == 360 * MIB and expandable.reserved == 140 * MIB


def test_out_of_memory_unmaps_free_pages_between():
    memory = allocator(100 * MIB)
    blocks = [memory.malloc(20 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        memory.free(block)
    assert memory.reserved == 100 * MIB
    big = memory.malloc(60 * MIB)  # three holes of 20 MiB each: their pages are mapped anew, in one piece
    assert (memory.reserved, memory.allocated, memory.statistics.retries) == (100 * MIB, 100 * MIB, 1)
    assert big.segment != blocks[3].segment
    with pytest.raises(torch.OutOfMemoryError, match=r"100.00 MiB is allocated by PyTorch, and 0 bytes is reserved"):
        memory.malloc(2 * MIB)


def test_empty_cache_keeps_pages_in_use():
    memory = allocator()
    first, second = memory.malloc(25 * MIB), memory.malloc(30 * MIB)
    memory.free(first)
    assert memory.empty_cache() == 20 * MIB, "the page that both use stays"
    assert memory.reserved == 40 * MIB
    assert memory.malloc(4 * MIB).address == first.address + 20 * MIB, "and what is free in it is used"
    end = second.address + second.size
    memory.free(second)
    assert memory.malloc(31 * MIB).address == end - 31 * MIB, "joined to the 1 MiB before it"


def test_all_is_given_back():
    memory = allocator()
    for block in [memory.malloc(size) for size in (100, 3 * MIB, 50 * MIB)]:
        memory.free(block)
    assert memory.special and memory.empty_cache() == 62 * MIB
    assert (memory.reserved, memory.all_blocks(), bool(memory.expandable)) == (0, [], False)
    assert memory.statistics.nested()["num_device_free"] == 2


def test_one_segment_per_stream_and_pool():
    memory = allocator()
    for stream in (0, 7):
        for size in (100 * KIB, 3 * MIB):
            memory.malloc(size, stream)
    assert memory.reserved == 44 * MIB
    assert len(memory.heads) == 4


def test_a_fraction_counts_what_would_be_asked():
    memory = CachingAllocator(GIB, config=Config(expandable_segments=True, memory_fraction=0.05))
    memory.malloc(30 * MIB)
    assert memory.reserved == 40 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"51.20 MiB allowed"):
        memory.malloc(12 * MIB)


def test_switched_off_they_serve_no_more():
    memory = allocator()
    memory.free(memory.malloc(30 * MIB))
    memory.configure(Config())
    assert memory.malloc(30 * MIB).segment is None and memory.reserved == 70 * MIB
    memory.configure(ON)
    assert memory.malloc(30 * MIB).segment is not None and memory.reserved == 70 * MIB


@settings(deadline=None)
@given(st.lists(STEPS, min_size=30, max_size=120), st.booleans(), st.integers(0, 100))
def test_bytes_add_up_in_expandable_segments(steps, switch, at):
    """Also where the setting changes on the way."""
    memory = allocator(100 * MIB, timeline=Time())
    program = Program(memory, streams=True)
    for number, step in enumerate(steps):
        program.step(*step)
        check(memory, program.live)
        if switch and number % 20 == at % 20:
            memory.configure(Config() if memory.config.expandable_segments else ON)
    for block in program.live:
        memory.free(block)
    memory.empty_cache()
    mapped = [block for block in memory.all_blocks() if block.mapped]  # the address range of a failed malloc may stay
    assert (memory.allocated, memory.reserved, mapped) == (0, 0, [])


@settings(deadline=None)
@given(st.lists(STEPS, min_size=30, max_size=100), st.integers(1, 60 * MIB))
def test_require_in_expandable_segments(steps, nbytes):
    memories = [allocator(100 * MIB, timeline=Time()) for _ in range(2)]
    outcomes = []
    for memory, call in zip(memories, ("malloc", "require"), strict=True):
        program = Program(memory, streams=True)
        for step in steps:
            program.step(*step)
        try:
            getattr(memory, call)(nbytes)
            outcomes.append("room")
        except torch.OutOfMemoryError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
