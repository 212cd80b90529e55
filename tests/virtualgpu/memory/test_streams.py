"""Free blocks belong to a stream; a block that another stream uses is free when that stream is done with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtualgpu.memory.programs import KIB, MIB, STEPS, Program, Time, check
from virtualgpu.memory.allocator import CachingAllocator


@pytest.fixture
def time():
    return Time()


def test_a_stream_reuses_only_its_own_blocks():
    memory = CachingAllocator(100 * MIB)
    first = memory.malloc(400 * KIB, 7)
    memory.free(first)
    assert memory.malloc(400 * KIB, 0).address != first.address and memory.reserved == 4 * MIB
    assert memory.malloc(400 * KIB, 7).address == first.address and memory.reserved == 4 * MIB


def test_a_shared_block_waits_for_the_other_stream(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    block = memory.malloc(300 * KIB)
    memory.record_stream(block, 7)
    time.work[7] = 5.0
    memory.free(block)
    figures = memory.statistics.nested()
    assert (memory.allocated, memory.statistics.now(2)) == (0, 300 * KIB), (
        "requested_bytes counts what waits, allocated_bytes not"
    )
    assert (figures["active"]["all"]["current"], figures["active_bytes"]["all"]["current"]) == (1, 300 * KIB)
    other = memory.malloc(300 * KIB)
    assert other.address != block.address and figures["active"]["all"]["peak"] == 1
    assert memory.statistics.nested()["active"]["all"]["peak"] == 2
    time.host = 5.0
    assert memory.malloc(300 * KIB).address == block.address, "looked at again by the next malloc"
    assert memory.statistics.nested()["active"]["all"]["current"] == 2


def test_the_moment_of_the_free_counts(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    block = memory.malloc(300 * KIB)
    memory.record_stream(block, 7)
    memory.free(block, {7: 1.0})
    time.work[7], time.host = 9.0, 1.0  # work queued after the free does not delay it
    assert memory.malloc(300 * KIB).address == block.address


def test_the_last_of_several_streams_counts(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    block = memory.malloc(300 * KIB)
    time.work = {7: 5.0, 9: 8.0}
    for stream in (7, 9, 7):
        memory.record_stream(block, stream)
    memory.free(block)
    for time.host, reused in ((5.0, False), (7.0, False), (8.0, True)):
        assert (memory.malloc(300 * KIB).address == block.address) is reused


def test_use_on_its_own_stream_changes_nothing(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    block = memory.malloc(300 * KIB, 7)
    memory.record_stream(block, 7)
    time.work[7] = 5.0
    memory.free(block)
    assert not block.used and memory.statistics.now(2) == 0


def test_blocks_that_wait_do_not_join(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    blocks = [memory.malloc(300 * KIB) for _ in range(3)]
    memory.record_stream(blocks[1], 7)
    time.work[7] = 5.0
    for block in (blocks[1], blocks[0], blocks[2]):
        memory.free(block)
    assert memory.malloc(700 * KIB).address == blocks[2].address, "the two holes beside it are apart"
    check(memory, [memory.all_blocks()[-2]])


def test_when_memory_runs_out_the_host_waits_for_streams(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    block = memory.malloc(60 * MIB)
    memory.record_stream(block, 7)
    time.work[7] = 5.0
    memory.free(block)
    memory.malloc(60 * MIB)
    assert time.host == 5.0 and memory.reserved == 60 * MIB
    figures = memory.statistics.nested()
    assert (figures["num_alloc_retries"], figures["num_sync_all_streams"], figures["num_ooms"]) == (1, 1, 0)
    assert (figures["num_device_alloc"], figures["num_device_free"]) == (2, 1)


def test_empty_cache_waits_too(time):
    memory = CachingAllocator(100 * MIB, timeline=time)
    block = memory.malloc(2 * MIB)
    memory.record_stream(block, 7)
    time.work[7] = 3.0
    memory.free(block)
    assert memory.empty_cache() == 20 * MIB and time.host == 3.0


def test_the_cache_of_one_stream_makes_room_for_another():
    memory = CachingAllocator(100 * MIB)
    memory.free(memory.malloc(60 * MIB, 7))
    assert memory.malloc(60 * MIB, 0).stream == 0 and memory.reserved == 60 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        memory.malloc(60 * MIB, 7)


@settings(deadline=None)
@given(st.lists(STEPS, min_size=30, max_size=120))
def test_bytes_add_up_with_streams(steps):
    memory = CachingAllocator(60 * MIB, timeline=Time())
    program = Program(memory, streams=True)
    for step in steps:
        program.step(*step)
        check(memory, program.live)
    for block in program.live:
        memory.free(block)
    memory.empty_cache()
    assert (memory.allocated, memory.statistics.now(2), memory.reserved, memory.all_blocks()) == (0, 0, 0, [])


@given(st.lists(STEPS, min_size=30, max_size=120), st.integers(1, 40 * MIB), st.sampled_from([0, 7]))
def test_require_says_what_malloc_would(steps, nbytes, stream):
    """Both from the same state: it raises where malloc raises, and is no malloc in the figures."""
    memories = [CachingAllocator(60 * MIB, timeline=Time()) for _ in range(2)]
    programs = [Program(memory, streams=True) for memory in memories]
    for step in steps:
        for program in programs:
            program.step(*step)
    outcomes = []
    for memory, call in zip(memories, ("malloc", "require"), strict=True):
        try:
            outcomes.append(str(getattr(memory, call)(nbytes, stream) is None))
        except torch.OutOfMemoryError as error:
            outcomes.append(str(error))
    figures = [memory.statistics.nested() for memory in memories]
    if outcomes[0] == "False":
        assert outcomes[1] == "True"
        before = figures[1]["allocation"]["all"]["allocated"]
        assert before == figures[0]["allocation"]["all"]["allocated"] - 1
        block = memories[1].malloc(
            nbytes, stream
        )  # now there is room, and no more is asked of the GPU than by malloc alone
        assert memories[1].reserved == memories[0].reserved and block.requested == nbytes
        assert memories[1].statistics.retries == memories[0].statistics.retries
        check(memories[1], [*programs[1].live, block])
    else:
        assert outcomes[0] == outcomes[1] and figures[0] == figures[1]


def test_require_of_several_sizes_together():
    memory = CachingAllocator(100 * MIB)
    memory.require([60 * MIB, 40 * MIB])
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 42.00 MiB.*60.00 MiB is allocated by PyTorch"):
        memory.require([60 * MIB, 42 * MIB])
    assert (memory.allocated, memory.statistics.ooms) == (0, 1)
    memory.require([])
    memory.require(0)
