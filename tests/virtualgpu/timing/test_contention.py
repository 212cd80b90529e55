"""Who shares a GPU: streams of other priorities, and NCCL's kernels with those beside them."""

import pytest

from virtualgpu.timing.nccl import Beside
from virtualgpu.timing.streams import Engine, Priorities, Queue


def of(*kernels: tuple[float, float]) -> Beside:
    engine = Engine()
    for kernel in kernels:
        engine.extend(*kernel)
    return Beside(engine)


def test_what_runs_at_the_same_time_counts_once():
    gpu = of((2, 4), (9, 12))
    gpu.add(1, 10, 0)
    assert gpu.alone() == 9 - 2 - 1
    gpu.add(3, 11, 0)  # of another communicator
    assert gpu.alone() == 6
    gpu.add(20, 21, 0)
    assert gpu.alone() == 7
    gpu.kernels.extend(20.5, 30)  # queued later
    assert gpu.alone() == 6.5 and gpu.charge() == 0


def test_the_parts_that_are_new():
    engine = Engine()
    assert engine.cover(1, 3) == [(1, 3)] and engine.cover(5, 7) == [(5, 7)]
    assert engine.cover(2, 9) == [(3, 5), (7, 9)] and engine.cover(0, 9) == [(0, 1)] and engine.cover(4, 6) == []
    assert (engine.starts, engine.ends) == ([0], [9])


def test_kernels_beside_it_do_without_its_processors():
    within, over = of((0, 6)), of((0, 20))
    for gpu in (within, over):
        gpu.add(0, 10, 0.1)
    assert within.charge() == pytest.approx(6 / 0.9 - 6)  # six seconds of work at nine tenths of the speed
    assert over.charge() == pytest.approx(1)  # beside it for ten seconds, of which they lose a tenth
    assert within.alone() == pytest.approx(10 - 6 / 0.9) and over.alone() == 0
    assert within.charge() == over.charge() == 0  # once
    over.kernels.extend(20, 30)
    assert over.charge() == 0
    within.kernels.extend(6 / 0.9, 20)
    assert within.charged + within.charge() == pytest.approx(1)


def test_a_collective_behind_slowed_kernels_comes_later():
    gpu = of((0, 20))
    gpu.add(0, 10, 0.1)
    assert gpu.lateness(5, 0) == pytest.approx(0.5) and gpu.lateness(20, 0) == pytest.approx(1)
    gpu.charge()
    assert gpu.lateness(20, gpu.charged) == 0  # launched when the stream had been charged
    gpu.add(15, 16, 0.1)
    assert gpu.lateness(20, 0) == pytest.approx(1.1)


# -- priorities: who goes before whom; test_streams has it with streams


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
