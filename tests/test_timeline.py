"""Rows that processes measured themselves, and neighbours that become one bar."""

import time

import pytest

from helpers import Recorder, Timeline, launch, plots
from helpers.timeline import Span, _joined


def test_recorder_notes_blocks_and_calls():
    recorder = Recorder()
    with recorder("wait"):
        time.sleep(0.02)
    double = recorder.wrap("forward", lambda x: 2 * x)
    assert double(3) == 6
    with pytest.raises(ZeroDivisionError), recorder("backward"):
        1 / 0  # noqa: B018
    assert [span.kind for span in recorder.spans] == ["wait", "forward", "backward"]
    assert recorder.spans[0].end - recorder.spans[0].start >= 0.02 and recorder.spans[0].end <= recorder.spans[1].start


def test_rows_of_ranks_begin_together():
    timeline = Timeline.of_ranks([[Span(10.0, 11.0, "forward")], [Span(11.0, 12.5, "backward")]])
    assert timeline.origin == "measured" and timeline.seconds == 2.5
    assert timeline.rows == {"rank 0": [Span(0.0, 1.0, "forward")], "rank 1": [Span(1.0, 2.5, "backward")]}
    assert Timeline.of_ranks([[], []]).rows == {"rank 0": [], "rank 1": []}


def test_two_processes_share_a_clock(capsys):
    def worker():
        import torch.distributed as dist

        recorder = Recorder()
        for rank in range(2):  # one after the other
            dist.barrier()
            if rank == dist.get_rank():
                with recorder("forward"):
                    time.sleep(0.1)
        return recorder.spans

    timeline = Timeline.of_ranks(launch(worker))
    (first,), (second,) = timeline.rows.values()
    assert first.end <= second.start + 0.02
    plots.timeline(timeline, "One after the other")
    assert "Figure" in capsys.readouterr().out


def test_neighbours_of_one_kind_are_joined():
    spans = [Span(0, 1, "forward"), Span(1.01, 2, "forward"), Span(2, 3, "copy"), Span(3.5, 4, "copy")]
    assert _joined(spans, 0.1) == [Span(0, 2, "forward"), Span(2, 3, "copy"), Span(3.5, 4, "copy")]
