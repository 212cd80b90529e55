"""A GPU's row of a timeline: neighbours that become one bar, and the passes of a pipeline."""

from virtualgpu.timeline import Pass, passes, row
from virtualgpu.timing.trace import Span


def span(start, end, kind):
    return Span(0, start, end, kind, kind)


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
    ways = [Pass(0, 1, 0, 0, "F"), Pass(1, 2, 1, 0, "F"), Pass(2, 5, 1, 0, "I"), Pass(5, 6, 1, 0, "W")]
    assert passes(drawn) == [*ways, Pass(6, 7, 0, 0, "B")]
    assert len(row([part(0, 1, "PP:1F0"), part(1, 2, "PP:1F1")], 0, seconds=2)) == 2
