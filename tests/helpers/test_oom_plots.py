"""The figures of notebooks 06 and 07: a step stacked by kind, segments as strips of blocks, the peak by kind, cures by time and memory."""

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


def test_a_peak_is_told_kind_by_kind(figures):
    layers = {"parameters": [2.0, 2.0, 2.0], "activations": [0.0, 5.0, 1.0]}
    assert lesson_07.at_the_peak(layers) == {"parameters": 2.0, "activations": 5.0}
    lesson_07.peaks({"one": {"a": 2.0, "b": 5.0}, "two": {"a": 4.0, "b": 0.25}}, "Two")
    (axes,) = figures[0].axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 2), (2, 5), (0, 4), (4, 0.25)]
    assert words(axes) == ["2.0", "5.0", "4.0"], "what is thin has no number"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


@pytest.fixture
def prices():
    """Of four cures: "dear" is beaten by "small", and "other" is a different training run."""
    found = lesson_07.PriceList.__new__(lesson_07.PriceList)
    kinds = "exact", "rounded", "exact", "approximate", lesson_07.OTHER
    found.kinds = dict(zip(("as it is", "fast", "dear", "small", "other"), kinds, strict=True))
    points = (1.0, 10.0), (0.5, 8.0), (2.0, 9.0), (1.5, 4.0), (0.4, 1.0)
    found.rows = {
        name: dict.fromkeys(lesson_07.PATIENTS, point) for name, point in zip(found.kinds, points, strict=True)
    }
    return found


def test_the_frontier_joins_what_nothing_beats_in_time_and_memory(figures, prices):
    assert lesson_07.frontier([(2, 1), (1, 2), (3, 1), (1, 3)]) == [(1, 2), (2, 1)]
    lesson_07.scatter(prices, "Cures")
    for axes in figures[0].axes:
        assert axes.lines[0].get_xydata().tolist() == [[0.5, 8.0], [1.5, 4.0]], "not the different training run"
        assert words(axes) == ["1", "2", "3", "4", "5"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()][1] == "2  fast"


def test_numbers_of_marks_in_one_place_do_not_lie_on_each_other():
    taken = []
    places = [lesson_07._free(10, 10, taken) for _ in lesson_07.PLACES]
    assert len(set(places)) == len(lesson_07.PLACES) and taken[0] == (10 + places[0][0], 10 + places[0][1])


def test_a_cure_is_exact_rounded_or_approximate():
    assert [lesson_07.kind(off) for off in (1e-6, 0.002, 0.05)] == ["exact", "rounded", "approximate"]


def test_adam_in_8_bits_goes_nearly_where_adam_goes():
    """Each parameter in one piece, and in several."""

    def path(make):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(6, 64))
        optimizer, start = make([p]), p.detach().clone()
        for _ in range(20):
            optimizer.zero_grad()
            (p - 1).square().sum().backward()
            optimizer.step()
        return p.detach() - start

    wanted, found = path(torch.optim.Adam), path(lesson_07.Adam8bit)
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.02


def test_a_layer_in_4_bits_is_nearly_the_layer():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32, bias=False), torch.randn(8, 64)
    packed = lesson_07.FourBit(layer)
    assert 0 < (packed(x) - layer(x)).norm() / layer(x).norm() < 0.1
    assert sum(b.nbytes for b in packed.buffers()) == 64 * 32 // 2 + 2 * 32
