"""Rows of ranks, and neighbours that become one bar."""

from dataclasses import replace

from helpers import Timeline, plots
from virtualgpu.simulation.clock import Span
from virtualgpu.simulation.timeline import Pass, passes, row


def span(start, end, kind):
    return Span(0, start, end, kind, kind)


def test_rows_of_ranks_begin_together():
    timeline = Timeline.of_ranks([[span(10.0, 11.0, "forward")], [span(11.0, 12.5, "backward")]])
    assert timeline.origin == "measured" and timeline.seconds == 2.5
    assert timeline.rows == {"rank 0": [span(0.0, 1.0, "forward")], "rank 1": [span(1.0, 2.5, "backward")]}
    assert Timeline.of_ranks([[], []]).rows == {"rank 0": [], "rank 1": []}


def test_collectives_of_one_name_stay_apart_and_are_numbered():
    """Buckets of DDP that follow each other at once were one bar."""
    buckets = [Span(0, start, start + 1, "communication", "all_reduce 25 MiB") for start in (10.0, 11.0)]
    spans = [span(9.0, 10.0, "backward"), Span(0, 9.0, 9.5, "communication", "broadcast 424 B"), *buckets]
    rows = Timeline.of_ranks([spans], number="all_reduce").rows["rank 0"]
    assert [(s.kind, s.start, s.annotation) for s in rows if s.kind == "communication"] == [
        ("communication", 0, ""),
        ("communication", 1, "0"),
        ("communication", 2, "1"),
    ]
    assert len(Timeline.of_ranks([buckets]).rows["rank 0"]) == 1


def test_ranks_rows_are_drawn_as_bars(capsys):
    """Neighbours are joined, and what a schedule leaves for later has its colour."""
    spans = [replace(span(10 + i, 11 + i, "backward"), annotation=f"PP:0{way}0") for i, way in enumerate("IIW")]
    timeline = Timeline.of_ranks([spans, []], origin="simulated")
    assert [(s.start, s.end, s.kind) for s in timeline.rows["rank 0"]] == [
        (0, 2, "backward"),
        (2, 3, "weight gradient"),
    ]
    plots.timeline(timeline, "Weights last")
    assert "Figure (simulated): Weights last" in capsys.readouterr().out


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


def test_slots_of_a_table_are_numbered_bars(capsys):
    timeline = Timeline.of_slots([["F0", None, None, "B0"], [None, "F0", "B0", None]])
    assert list(timeline.rows) == ["stage 0", "stage 1"] and timeline.seconds == 0.004 and timeline.origin == "data"
    assert [(bar.start, bar.number) for bar in passes(timeline.rows["stage 1"])] == [(0.001, 0), (0.002, 0)]
    assert [span.kind for span in timeline.rows["stage 1"]] == ["forward", "backward"]
    plots.timeline(timeline, "turns", until=0.008, xlabel="slots")
    plots.timeline(Timeline.of_slots([]), "nothing", until=1.0)
