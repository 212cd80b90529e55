"""Priorities of streams: who goes before whom, and what stays as it was."""

import pytest
import torch

import virtualgpu
from virtualgpu.engine.machine import GAP
from virtualgpu.timing.streams import Engine, Priorities, Queue


def ends(priorities: tuple[int, int], host_waits=False) -> tuple[list[float], list[float], float]:
    """Ten products on one stream, then one on another: when each of the first ended, and of the second; and how long one takes."""
    with virtualgpu.dry_run():
        x, out = torch.ones(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
        low, high = (torch.cuda.Stream(priority=priority) for priority in priorities)
        torch.cuda.synchronize()
        with virtualgpu.recording() as spans:
            for stream, times in ((low, 10), (high, 1)):
                if stream is high and host_waits:
                    low.synchronize()
                with torch.cuda.stream(stream):
                    for _ in range(times):
                        torch.mm(x, x, out=out)
            after = torch.cuda.Event(enable_timing=True)
            before = torch.cuda.Event(enable_timing=True)
            after.record(low)
            before.record(high)
            torch.cuda.synchronize()
        of = [[span.end for span in spans if span.stream == stream.stream_id] for stream in (low, high)]
        return *of, spans[0].end - spans[0].start, before.elapsed_time(after) / 1e3


def test_a_kernel_goes_before_those_that_have_not_begun(gpus):
    low, high, lasts, between = ends((0, -1))
    assert high == [pytest.approx(low[0] + lasts)]  # the first had begun
    assert low[1:] == pytest.approx([low[0] + lasts * n for n in range(2, 11)])  # the others are that much later
    assert between == pytest.approx(9 * lasts)  # and so is what is recorded behind them


@pytest.mark.parametrize("priorities", [(0, 0), (-1, -1), (-2, -1)])
def test_others_wait_for_their_turn(gpus, priorities):
    low, high, lasts, _ = ends(priorities)
    assert high == [pytest.approx(low[-1] + lasts)]


def test_what_is_over_stays(gpus):
    low, high, lasts, _ = ends((0, -1), host_waits=True)
    assert high[0] >= low[-1] + lasts * 0.999 and low == pytest.approx([low[0] + (lasts + GAP) * n for n in range(10)])


def test_gaps_take_what_is_moved():
    engine = Engine()
    of, low, high = Priorities(engine), Queue(0, 1), Queue(0, 2, -1)
    for ready in (0, 2, 10):
        start = of.reserve(low, max(ready, low.ready), 2, None)
        low.ready = start + 2
    assert (engine.starts, engine.ends) == ([0, 10], [4, 12])
    assert of.reserve(high, 1, 3, None) == 2
    assert [(one.start, one.end) for one in of.kernels[:3]] == [(0, 2), (5, 7), (10, 12)] and low.ready == 12
    assert (engine.starts, engine.ends) == ([0, 10], [7, 12])
    assert of.reserve(high, 8, 3, None) == 8 and low.ready == 13


def test_what_is_free_again():
    engine = Engine()
    engine.extend(0, 10)
    engine.free(2, 4)
    assert (engine.starts, engine.ends) == ([0, 4], [2, 10])
    engine.free(0, 2)
    engine.free(8, 10)
    assert (engine.starts, engine.ends) == ([4], [8])
    engine.free(4, 8)
    engine.free(4, 8)
    assert (engine.starts, engine.ends) == ([], [])


def test_others_are_moved_by_its_length_and_no_more():
    """Whatever the lengths: a slot that is short by the last bit would send a kernel behind all others."""

    low, high, ranked = Queue(0, 0), Queue(0, 1, -1), Priorities(Engine())
    for number in range(200):
        low.ready = ranked.reserve(low, low.ready, 1e-4 / (3 + number % 7), None) + 1e-4 / (3 + number % 7)
    before, seconds = low.ready, 4.7e-4 / 7
    for number in range(50):
        ranked.reserve(high, number * 1e-5, seconds, None)
    assert low.ready == pytest.approx(before + 50 * seconds, rel=1e-9)
