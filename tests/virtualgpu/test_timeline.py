"""What each GPU, rank or stage did when. What a block of virtual GPUs records: timing/test_clock."""

from dataclasses import replace

from virtualgpu import Timeline
from virtualgpu.timeline import passes
from virtualgpu.timing.trace import Span


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


def test_what_a_schedule_leaves_for_later_has_a_kind_of_its_own():
    spans = [replace(span(10 + i, 11 + i, "backward"), annotation=f"PP:0{way}0") for i, way in enumerate("IIW")]
    timeline = Timeline.of_ranks([spans, []], origin="simulated")
    assert [(s.start, s.end, s.kind) for s in timeline.rows["rank 0"]] == [
        (0, 2, "backward"),
        (2, 3, "weight gradient"),
    ]


def test_idle_is_what_all_gpus_do_not_compute():
    timeline = Timeline.of_ranks(
        [[span(0, 1, "forward"), span(1, 4, "copy")], [span(0, 3, "backward"), span(3, 4, "waiting")]]
    )
    assert timeline.idle == 50


def test_slots_of_a_table_are_numbered():
    timeline = Timeline.of_slots([["F0", None, None, "B0"], [None, "F0", "B0", None]])
    assert list(timeline.rows) == ["stage 0", "stage 1"] and timeline.seconds == 0.004 and timeline.origin == "data"
    assert [(bar.start, bar.number) for bar in passes(timeline.rows["stage 1"])] == [(0.001, 0), (0.002, 0)]
    assert [span.kind for span in timeline.rows["stage 1"]] == ["forward", "backward"]
    assert Timeline.of_slots([]).seconds == 0
