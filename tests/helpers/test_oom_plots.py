"""The figures of notebooks 06 and 07: a step stacked by kind, segments as strips of blocks, cures as bars."""

import pytest
import torch

from helpers import plots
from helpers.plots import figures as drawing
from notebooks.figures import lesson_06, lesson_07

MIB = 1 << 20


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn; nothing is displayed."""
    found, canvas = [], drawing.FigureCanvasAgg
    monkeypatch.setattr(drawing, "FigureCanvasAgg", lambda figure: found.append(figure) or canvas(figure))
    monkeypatch.setattr(drawing, "display", lambda *args, **kwargs: None)
    return found


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_layers_lie_on_each_other_below_the_names_of_the_phases(figures):
    layers = {"parameters": [2.0] * 40, "activations": [0.0] * 10 + [3.0] * 30}
    plots.stacked(layers, "A step", "events", "MiB", "simulated", [(0, "model"), (1, "forward"), (20, "backward")])
    (axes,) = figures[0].axes
    tops = [collection.get_datalim(axes.transData).y1 for collection in axes.collections]
    assert tops == [2.0, 5.0] and axes.get_ylim()[1] > 5
    assert words(axes) == ["forward", "backward"], "a phase of one event has no room for its name"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["activations", "parameters"]


def test_a_peak_of_one_event_among_thousands_is_seen(figures):
    layers = {"parameters": [1.0] * 20_000, "temporary": [0.0] * 20_000}
    layers["temporary"][12_345] = 7.0
    plots.stacked(layers, "A step", "events", "MiB", "simulated")
    _, temporary = figures[0].axes[0].collections
    high = [x for x, y in temporary.get_paths()[0].vertices if y == 8.0]
    assert min(high) <= 12_345 <= max(high) and max(high) - min(high) >= 20_000 / 600


def test_pictures_of_two_steps_compare_on_one_axis(figures):
    for held in ([1.0, 2.0], [1.0, 9.0]):
        plots.stacked({"parameters": held}, "A step", "events", "MiB", "simulated", top=10)
    assert [figure.axes[0].get_ylim() for figure in figures] == [(0, 10), (0, 10)]


def test_segments_of_a_row_follow_each_other_block_by_block(figures):
    used, free = {"state": "active_allocated", "size": 2 * MIB}, {"state": "inactive", "size": 18 * MIB}
    small, large = (
        {"total_size": 20 * MIB, "blocks": [used, free]},
        {"total_size": 64 * MIB, "blocks": [used | {"size": 64 * MIB}]},
    )
    lesson_06.blocks({"one": [small], "two": [small, large]}, "Gaps", "simulated")
    (axes,) = figures[0].axes
    assert axes.get_xlim() == (0, 84)
    assert words(axes) == ["18", "18", "64"], "a narrow block has no number"
    widths = [[path.get_extents().width for path in bars.get_paths()] for bars in axes.collections]
    assert widths == [[2], [18], [2], [18], [64]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["in use", "free"]


def test_each_climb_ends_in_the_error_below_the_same_ceiling(figures):
    lesson_06.climbs({"a batch": [0, 8, 16], "a leak": [0, 4, 2, 6]}, 20, "Two causes", "simulated")
    left, right = figures[0].axes
    assert [axes.get_title(loc="left") for axes in (left, right)] == ["a batch", "a leak"]
    for axes, held in ((left, [0, 8, 16]), (right, [0, 4, 2, 6])):
        curve, ceiling, cross = axes.lines
        assert [*curve.get_ydata()] == held and set(ceiling.get_ydata()) == {20}
        assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (len(held) - 1, held[-1])


def test_each_holder_points_to_the_storage(figures):
    lesson_06.holders(["a name", "a view"], "storage", "Who holds it")
    assert words(figures[0].axes[0]) == ["storage", "a name", "a view"]


def test_a_recorded_step_names_the_phase_of_its_peak(gpu, figures):
    record = lesson_06.Recorder(gpu)
    with record("model"):
        weight = torch.zeros(MIB, device=gpu)  # 4 MiB
    for mib in (2, 8):
        with record("forward"):
            kept = weight[: mib * MIB // 4].clone() if mib < 4 else torch.zeros(mib * MIB // 4, device=gpu)
        with record("optimizer"):
            del kept
            state = torch.zeros(MIB, device=gpu)
            del state
    steps = record.end()
    assert steps.peaks() == [("optimizer", 8.0), ("forward", 12.0)]
    steps.draw("Two steps", 20)
    assert figures[0].axes[0].get_ylim() == (0, 20)


def test_bars_of_a_group_lie_side_by_side_in_the_order_given(figures):
    lesson_07.left({"dear": (50.0, 100.0), "cheap": (20.0, 90.0)}, ["one", "two"], "A trade", "%", "simulated")
    (axes,) = figures[0].axes
    one, two = axes.containers
    assert [bar.get_width() for bar in one] == [50, 20] and [bar.get_width() for bar in two] == [100, 90]
    assert [bar.get_y() for bar in two] == pytest.approx([bar.get_y() + bar.get_height() for bar in one])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["dear", "cheap"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
