"""Rows that processes measured themselves, and neighbours that become one bar."""

import time

import pytest

from helpers import Recorder, Timeline, launch, plots
from virtualgpu.simulation.clock import Span
from virtualgpu.simulation.timeline import Pass, passes, row


def span(start, end, kind):
    return Span(0, start, end, kind, kind)


def test_recorder_notes_blocks_and_calls():
    recorder, start = Recorder(), time.perf_counter()
    with recorder("wait"):
        between = time.perf_counter()
    double = recorder.wrap("forward", lambda x: 2 * x)
    assert [double(3), double(4)] == [6, 8]
    with pytest.raises(ZeroDivisionError), recorder("backward"):
        1 / 0  # noqa: B018
    assert [span.kind for span in recorder.spans] == ["wait", "forward", "forward", "backward"]
    first, second = recorder.spans[:2]
    assert start <= first.start <= between <= first.end <= second.start <= second.end <= time.perf_counter()


def test_rows_of_ranks_begin_together():
    timeline = Timeline.of_ranks([[span(10.0, 11.0, "forward")], [span(11.0, 12.5, "backward")]])
    assert timeline.origin == "measured" and timeline.seconds == 2.5
    assert timeline.rows == {"rank 0": [span(0.0, 1.0, "forward")], "rank 1": [span(1.0, 2.5, "backward")]}
    assert Timeline.of_ranks([[], []]).rows == {"rank 0": [], "rank 1": []}


def test_trials_of_one_process_share_a_row():
    found = Timeline.of_workers([(7, 10.0, 11.0, False), (5, 10.5, 10.6, True), (7, 11.0, 12.0, True)])
    assert found.origin == "measured" and found.seconds == 2.0
    kinds = {name: [(span.start, span.end, span.kind) for span in row] for name, row in found.rows.items()}
    assert kinds == {
        "worker 0": [(0.5, pytest.approx(0.6), "cut")],
        "worker 1": [(0.0, 1.0, "trial"), (1.0, 2.0, "cut")],
    }


def test_two_processes_share_a_clock(capsys):
    def worker():
        import torch.distributed as dist

        recorder = Recorder()
        for rank in range(2):  # one after the other
            if rank == dist.get_rank():
                with recorder("forward"):
                    pass
            dist.barrier()
        return recorder.spans

    timeline = Timeline.of_ranks(launch(worker))
    (first,), (second,) = timeline.rows.values()
    assert first.end <= second.start
    plots.timeline(timeline, "One after the other")
    assert "Figure" in capsys.readouterr().out


def test_neighbours_of_one_kind_are_joined():
    """And only those: whatever order they were queued in, on whichever stream."""
    spans = [span(12, 13, "copy"), span(10, 11, "forward"), span(11.001, 12, "forward"), span(13.5, 14, "copy")]
    joined = [span(0, 2, "forward"), span(2, 3, "copy"), span(3.5, 4, "copy")]
    assert row(spans, 10, seconds=4) == joined
    assert row([span(10, 14, "copy"), span(11, 12, "copy")], 10, seconds=4) == [span(0, 4, "copy")]


def test_passes_of_micro_batches():
    """As torch.distributed.pipelining calls them. A stage is counted among those of its GPU."""

    def part(start, end, annotation, kind="backward"):
        return Span(0, start, end, kind, "mm", annotation=annotation)

    spans = [
        part(0, 1, "PP:1F0", "forward"),
        part(1, 2, "PP:5F0", "forward"),
        part(2, 3, "PP:5I0"),
        part(4, 5, "PP:5I0"),
    ]
    spans += [part(5, 6, "PP:5W0"), part(6, 7, "PP:1B0"), part(7, 8, "PP:1REDUCE_GRAD"), part(8, 9, "Optimizer.step")]
    drawn = row(spans, 0, seconds=9)
    assert [span.kind for span in drawn][4:6] == ["weight gradient", "backward"]
    assert passes(drawn) == [Pass(0, 1, 0, 0), Pass(1, 2, 1, 0), Pass(2, 5, 1, 0), Pass(5, 6, 1, 0), Pass(6, 7, 0, 0)]
    assert len(row([part(0, 1, "PP:1F0"), part(1, 2, "PP:1F1")], 0, seconds=2)) == 2
