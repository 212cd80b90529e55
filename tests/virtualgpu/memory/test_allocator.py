"""The caching allocator: its rounding as documented, its invariants under random programs, and its words when memory is
out."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import event, given

from virtualgpu.memory.allocator import CachingAllocator, format_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    "request_, allocated, reserved",
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what would be left over, 1 MiB, is not split off: it counts as allocated
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_one_request(request_, allocated, reserved):
    memory = CachingAllocator(GIB)
    block = memory.malloc(request_)
    assert (memory.allocated, memory.reserved) == (allocated, reserved)
    memory.free(block)
    assert (memory.allocated, memory.reserved) == (0, reserved), "a freed block stays reserved"
    assert memory.empty_cache() == reserved and memory.reserved == 0
    assert (memory.peak_allocated, memory.peak_reserved) == (allocated, reserved)


def test_no_bytes_need_no_block():
    memory = CachingAllocator(GIB)
    assert memory.malloc(0) is None and memory.reserved == 0
    memory.free(None)


def test_small_requests_share_a_segment_and_the_best_fitting_hole_is_used():
    memory = CachingAllocator(GIB)
    blocks = [memory.malloc(size * KIB) for size in (300, 100, 200, 100, 400)]
    assert memory.reserved == 2 * MIB
    memory.free(blocks[0])
    memory.free(blocks[2])
    assert memory.malloc(150 * KIB).address == blocks[2].address, "200 KiB fit better than 300"
    assert memory.malloc(250 * KIB).address == blocks[0].address
    assert memory.reserved == 2 * MIB


def test_free_neighbours_join():
    memory = CachingAllocator(GIB)
    one, two, three, guard = (memory.malloc(400 * KIB) for _ in range(4))
    for block in (one, three, two):  # the middle one last: it joins both
        memory.free(block)
    assert memory.malloc(1000 * KIB).address == one.address, "three holes of 400 KiB became one of 1,200"
    assert guard.used and memory.reserved == 2 * MIB


def test_fragmentation_much_is_free_and_nothing_fits():
    """The message tells it: reserved but unallocated. Only a whole free segment can be given back."""
    memory = CachingAllocator(20 * MIB)
    blocks = [memory.malloc(4 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        memory.free(block)
    with pytest.raises(torch.OutOfMemoryError, match=r"8.00 MiB is allocated by PyTorch, and 12.00 MiB is reserved"):
        memory.malloc(5 * MIB)
    assert memory.empty_cache() == 0
    memory.malloc(4 * MIB)


def test_when_the_gpu_is_full_the_cache_is_given_back_first():
    memory = CachingAllocator(100 * MIB)
    memory.free(memory.malloc(60 * MIB))
    assert memory.reserved == 60 * MIB
    memory.malloc(80 * MIB)
    assert (memory.reserved, memory.statistics.retries, memory.statistics.ooms) == (80 * MIB, 1, 0)


def test_out_of_memory_in_pytorchs_words():
    memory = CachingAllocator(256 * MIB, device=1, context=50 * MIB, others=6 * MIB)
    memory.malloc(150 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        memory.malloc(90 * MIB + 1)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 92.00 MiB. GPU 1 has a total capacity of 256.00 MiB of which 50.00 MiB is "
        "free. Including non-PyTorch memory, this process has 200.00 MiB memory in use. Of the allocated memory 150.00 MiB "
        "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    )
    assert (memory.allocated, memory.reserved, memory.statistics.ooms) == (150 * MIB, 150 * MIB, 1), (
        "the failed request changed nothing"
    )


def test_a_process_may_be_held_to_a_fraction():
    memory = CachingAllocator(GIB)
    memory.limit_to(100 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"100.00 MiB allowed; Of the allocated memory"):
        memory.malloc(101 * MIB)
    memory.malloc(100 * MIB)


@pytest.mark.parametrize("size, text", [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (3 * MIB // 2, "1.50 MiB"),
                                        (GIB, "1024.00 MiB"), (15 * GIB, "15.00 GiB")])  # fmt: skip
def test_sizes_are_printed_as_pytorch_prints_them(size, text):
    assert format_size(size) == text


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(1, 30 * MIB))
ACTIONS = st.one_of(
    *[st.tuples(st.just("malloc"), SIZES)] * 2, st.tuples(st.just("free"), SIZES), st.just(("empty_cache", 0))
)


@given(st.lists(ACTIONS, min_size=50, max_size=200))
def test_invariants_under_random_programs(actions):
    """No two blocks overlap, what is allocated is what the live blocks hold, reserved covers it, and nothing is
    lost."""
    memory = CachingAllocator(60 * MIB)  # so that memory runs out, too
    live, largest = [], 0
    for action, number in actions:
        if action == "malloc":
            before = (memory.allocated, len(live))
            try:
                live.append(memory.malloc(number))
                assert live[-1].size >= number
            except torch.OutOfMemoryError:
                event("out of memory")
                assert (memory.allocated, len(live)) == before
        elif action == "free" and live:
            memory.free(live.pop(number % len(live)))
        elif action == "empty_cache":
            reserved, whole = memory.reserved, sum(b.size for b in memory.all_blocks() if b.whole and not b.used)
            assert memory.empty_cache() == whole == reserved - memory.reserved
        free = [block for pool in memory.pools for block in pool.free_blocks()]
        spans = sorted((block.address, block.address + block.size) for block in live + free)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "two blocks overlap"
        assert memory.allocated == sum(block.size for block in live)
        assert memory.reserved == sum(end - start for start, end in spans) <= memory.capacity
        assert not any(block.used for block in free) and all(block.used for block in live)
        assert not any(b.after is not None and not b.after.used for b in free), "two free neighbours did not join"
        largest = max(largest, memory.allocated)
    assert memory.peak_allocated == largest
    for block in live:
        memory.free(block)
    memory.empty_cache()
    assert (memory.allocated, memory.reserved, memory.all_blocks()) == (0, 0, [])


@given(st.lists(st.tuples(ACTIONS, SIZES), min_size=10, max_size=80))
def test_memory_that_is_lent_is_taken_and_given_back(steps):
    """`lend` has a short way: all figures and blocks are as after malloc and free."""

    def way(lend):
        memory, live, figures = CachingAllocator(GIB), [], []
        for (action, number), size in steps:
            if action == "malloc" and memory.allocated < GIB // 2:
                live.append(memory.malloc(number))
            elif action == "free" and live:
                memory.free(live.pop(number % len(live)))
            elif action == "empty_cache":
                memory.empty_cache()
            lend(memory, size)
            figures.append([(block.address, block.size) for block in memory.all_blocks()])
        return memory.statistics.nested(), figures

    assert way(lambda memory, size: memory.lend(size)) == way(lambda memory, size: memory.free(memory.malloc(size)))
