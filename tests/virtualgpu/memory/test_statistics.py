"""Every figure of memory_stats, against one that is computed anew from all blocks after each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.virtualgpu.memory.programs import MIB, STEPS, Program, Time
from virtualgpu.memory.allocator import CachingAllocator

POOLS = {"all": (True, False), "small_pool": (True,), "large_pool": (False,)}
FIGURES = {  # of blocks: which count, and by what
    "allocation": (lambda b: b.used and not b.waiting, lambda b: 1),
    "allocated_bytes": (lambda b: b.used and not b.waiting, lambda b: b.size),
    "active": (lambda b: b.used, lambda b: 1),
    "active_bytes": (lambda b: b.used, lambda b: b.size),
    "requested_bytes": (lambda b: b.used, lambda b: b.requested),
    "inactive_split": (lambda b: not b.used and not b.whole, lambda b: 1),
    "inactive_split_bytes": (lambda b: not b.used and not b.whole, lambda b: b.size),
    "segment": (lambda b: b.prev is None, lambda b: 1),
    "reserved_bytes": (lambda b: True, lambda b: b.size),
}


def present(memory: CachingAllocator) -> dict[tuple[str, str], int]:
    """Each figure's present value, counted from the blocks."""
    blocks = memory.all_blocks()
    return {
        (figure, pool): sum(amount(block) for block in blocks if block.free_list.pool.small in sizes and counts(block))
        for pool, sizes in POOLS.items()
        for figure, (counts, amount) in FIGURES.items()
    }


class Witness:
    """What came and went, and the peaks, from looking after each step."""

    def __init__(self):
        self.now = dict.fromkeys(((figure, pool) for figure in FIGURES for pool in POOLS), 0)
        self.peak, self.came, self.went = dict(self.now), dict(self.now), dict(self.now)

    def look(self, memory: CachingAllocator) -> None:
        for key, value in present(memory).items():
            change = value - self.now[key]
            self.came[key] += max(0, change)
            self.went[key] += max(0, -change)
            self.now[key], self.peak[key] = value, max(self.peak[key], value)

    def compare(self, memory: CachingAllocator) -> None:
        figures = memory.statistics.nested()
        for (figure, pool), value in self.now.items():
            key = (figure, pool)
            expected = {"current": value, "peak": self.peak[key], "allocated": self.came[key], "freed": self.went[key]}
            assert figures[figure][pool] == expected, key


@given(st.lists(STEPS, min_size=30, max_size=100), st.integers(0, 60), st.integers(0, 60))
def test_all_figures_on_one_stream(steps, reset_peaks, reset_accumulated):
    memory, witness = CachingAllocator(1 << 40), Witness()
    program = Program(memory, streams=False)
    for number, step in enumerate(steps):
        program.step(*step)
        witness.look(memory)
        if number % 7 == 0:
            witness.compare(memory)
        if number == reset_peaks:
            memory.statistics.reset_peaks()
            witness.peak = dict(witness.now)
        if number == reset_accumulated:
            memory.statistics.reset_accumulated()
            witness.came, witness.went = dict.fromkeys(witness.now, 0), dict.fromkeys(witness.now, 0)
    witness.compare(memory)
    assert (memory.peak_allocated, memory.peak_reserved) == tuple(
        witness.peak[figure, "all"] for figure in ("allocated_bytes", "reserved_bytes")
    )


def compare_with_streams(steps, reset):
    """The peaks since the step of that number, seen after each step and each block that no stream works on any more: of two that
    end together, the first is a free piece until the second joins it."""
    memory, witness = CachingAllocator(1 << 40, timeline=Time()), Witness()
    program, free = Program(memory, streams=True), memory.free

    def look_after(block, waited=False):
        free(block, waited=waited)
        if waited:
            witness.look(memory)

    memory.free = look_after
    for number, step in enumerate(steps):
        program.step(*step)
        witness.look(memory)
        if number == reset:
            memory.statistics.reset_peaks()
            witness.peak = dict(witness.now)
    figures = memory.statistics.nested()
    for (figure, pool), value in witness.now.items():
        assert figures[figure][pool]["current"] == value, (figure, pool)
        assert figures[figure][pool]["peak"] == witness.peak[figure, pool], (figure, pool)
        assert figures[figure][pool]["allocated"] - figures[figure][pool]["freed"] == value, (figure, pool)


@given(st.lists(STEPS, min_size=30, max_size=100), st.integers(0, 60))
def test_present_values_and_peaks_with_streams(steps, reset):
    compare_with_streams(steps, reset)


@pytest.mark.parametrize("last", [("empty_cache", 0, 0), ("malloc", 20 * MIB, 0)])
def test_two_blocks_of_a_segment_that_streams_finish_together(last):
    taken = [("malloc", MIB, 0)] * 2 + [("share", 0, 7), ("share", 1, 7), ("pass", 3, 7)]
    compare_with_streams([*taken, ("free", 0, 0), ("free", 0, 0), ("pass", 0, 0), ("pass", 0, 0), last], reset=6)


def test_counters_are_reset():
    memory = CachingAllocator(10 * MIB)
    with pytest.raises(Exception, match="out of memory"):
        memory.malloc(11 * MIB)
    assert (memory.statistics.retries, memory.statistics.ooms) == (1, 1)
    memory.statistics.reset_accumulated()
    assert (memory.statistics.retries, memory.statistics.ooms) == (0, 0)


def test_listeners_hear_of_every_event():
    memory, heard, reserved = CachingAllocator(100 * MIB), [], []
    listener = lambda *event: heard.append(event)  # noqa: E731
    memory.watch(listener)
    memory.on_reserved = lambda which: reserved.append(which.reserved)
    block = memory.malloc(2 * MIB + 1)
    memory.free(block)
    memory.empty_cache()
    at = block.address
    assert heard == [
        ("segment_alloc", at, 20 * MIB, 0, None),
        ("alloc", at, 2 * MIB + 1, 0, block),
        ("free_requested", at, 2 * MIB + 1, 0, block),
        ("free_completed", at, 2 * MIB + 1, 0, block),
        ("segment_free", at, 20 * MIB, 0, None),
    ]
    assert reserved == [20 * MIB, 0], "who asks is told of it"
    memory.watch(listener, on=False)
    memory.malloc(1)
    assert len(heard) == 5
