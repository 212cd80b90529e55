"""helpers.plots: drawn from data with gaps, labelled, and described in words."""

import base64
import io
import math
import re

import numpy as np
import pytest
from PIL import Image

import virtualgpu
from helpers import data, plots
from helpers.plots import figures as drawing
from notebooks.figures import lesson_01
from virtualgpu.monitor import Reading, Source
from virtualgpu.timeline import Timeline, row
from virtualgpu.timing.clock import Span


class Two(Source):
    devices, interval, origin = ["cuda:0", "cuda:1"], 1.0, "measured"


def watched():
    monitor = virtualgpu.Monitor(Two())
    readings = [(90.0, 40.0), (math.nan, 50.0), (80.0, 45.0)]
    monitor.samples = [(3 * i, [Reading(v) for v in pair]) for i, pair in enumerate(readings)]
    monitor.step_times = [0.1 * i for i in range(9)]
    return monitor


def test_every_figure_says_where_its_numbers_come_from(shown):
    images, labels = data.digits()
    plots.utilization(watched(), "Both are busy")
    plots.curves({"a": [1, 2], "b": [2, 1]}, "They cross", "epoch", "loss", "simulated", mark=2)
    plots.dots({"a": [1.0, 2.0, 4.0], "b": [3.0]}, "b is more", "accuracy (%)")
    lesson_01.images(images[:5], labels[:5].tolist(), "Digits", rows=2)
    said = [bundle["text/plain"] for bundle, _ in shown]
    assert said == ["Figure (measured): Both are busy", "Figure (simulated): They cross",
                    "Figure (measured): b is more", "Figure (data): Digits"]  # fmt: skip
    for bundle, metadata in shown:
        assert metadata["image/png"]["alt"] == bundle["text/plain"]
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).convert("L"))
        assert picture.shape[1] == drawing.WIDTH * drawing.DPI and (picture < 128).any(), "something is drawn"


def test_a_failed_reading_breaks_the_line(figures):
    """And an iteration without one does not: only those in which a reading was due are points."""
    plots.utilization(watched(), "t")
    first, second = [line.get_xydata().tolist() for line in figures[0].axes[0].lines if line.get_label() in Two.devices]
    assert str(first) == "[[0.0, 90.0], [3.0, nan], [6.0, 80.0]]" and second == [[0, 40], [3, 50], [6, 45]]


def texts(artists):
    return [text.get_text() for text in artists]


def legend(axes):
    return texts(axes.get_legend().get_texts())


def of_slots(*rows, **options):
    plots.timeline(Timeline.of_slots([*rows]), "slots", xlabel="slots", **options)


def of_rank(*spans):
    plots.timeline(Timeline({"rank 0": row([*spans], 0, 4)}, 4, "simulated"), "A rank")


def part(start, stage, way, number):
    kind = "forward" if way == "F" else "backward"
    return Span(0, start, start + 1, kind, "mm", annotation=f"PP:{stage}{way}{number}")


def numbered():
    spans = [Span(0, start, start + 1, "communication", "all_reduce") for start in range(3)]
    plots.timeline(Timeline.of_ranks([spans], number="all_reduce"), "Three buckets")


def weights_last():
    late = Span(0, 10, 11, "backward", "mm", annotation="PP:0W0")
    plots.timeline(Timeline.of_ranks([[late], []], origin="simulated"), "Weights last")


def events(count, **high):
    layers = {"parameters": [1.0] * count, "temporary": [0.0] * count}
    for place, value in high.items():
        layers["temporary"][int(place[1:])] = value
    plots.stacked(layers, "A step", "events", "MiB", "simulated")


def highest(axes):
    """Where the upper layer's edge is at 8, and how far that is too wide."""
    high = [x for x, y in axes.collections[1].get_paths()[0].vertices if y == 8.0]
    return min(high) <= 12_345 <= max(high), max(high) - min(high) <= 20_000 / 500


@pytest.mark.parametrize("draw, found, wanted", [
    # the largest on top: labels are read from below
    (lambda: plots.bars({"small": 1, "large": 5}, "t", "MiB", "simulated"), lambda axes: texts(axes.get_yticklabels()), ["small", "large"]),
    # kept as given, a color for each kind
    (lambda: plots.bars({"one": 1, "many, 0": 5, "many, 1": 3}, "t", "MiB", "simulated", kept=True),
     lambda axes: (texts(axes.get_yticklabels()), len({bar.get_facecolor() for bar in axes.patches})), (["many, 1", "many, 0", "one"], 2)),
    # points have the color of the line that they name
    (lambda: plots.sweep([1, 2], {"a": [1, 2], "b": [3, 4]}, "t", "GPUs", "%", "simulated", {"formula, b": {1: 2}, "others": {2: 3}}, (0, 9)),
     lambda axes: ([drawing.COLORS.index(line.get_color()) for line in axes.lines], axes.get_ylim()), ([0, 1, 1, 3], (0, 9))),
    (numbered, lambda axes: texts(axes.texts)[:3], ["0", "1", "2"]),
    (weights_last, legend, ["weight gradient"]),
    (lambda: of_slots(["F0", "B0"], until=0.005), lambda axes: (axes.get_xlim(), axes.get_xlabel()), ((0, 5), "slots")),
    # a pipeline's bars have the numbers of their micro-batches
    (lambda: of_rank(part(0, 0, "F", 0), part(1, 0, "F", 1), part(2, 0, "B", 0), part(3, 0, "B", 1)),
     lambda axes: [(text.get_text(), text.get_position()) for text in axes.texts[:4]],
     [("0", (500, 0)), ("1", (1500, 0)), ("0", (2500, 0)), ("1", (3500, 0))]),
    # gathers and reduce-scatters that follow each other have a color each
    (lambda: of_rank(*[Span(0, start, start + 1, "communication", ("all_gather 16 MiB", "ncclReduceScatter_RING")[start % 2], 7) for start in range(4)]),
     lambda axes: (legend(axes), {bars.get_label(): len(bars.get_paths()) for bars in axes.collections if bars.get_paths()}, axes.texts[-1].get_text()),
     (["all-gather", "reduce-scatter"], {"all-gather": 2, "reduce-scatter": 2}, "0 % computing")),
    # waiting for other ranks is drawn as waiting, in grey
    (lambda: of_rank(*[Span(0, *when, kind, kind, 7 * (kind != "forward")) for kind, *when in (("forward", 0, 1), ("waiting", 1, 3), ("communication", 3, 4))]),
     lambda axes: (legend(axes), axes.texts[-1].get_text(), len({*next(bars for bars in axes.collections if bars.get_label() == "waiting").get_facecolor()[0][:3]})),
     (["forward", "waiting", "communication"], "25 % computing", 1)),
    # a peak of one event among thousands is seen
    (lambda: events(20_000, x12345=7.0), highest, (True, True)),
    (lambda: plots.stacked({"parameters": [1.0, 2.0]}, "A step", "events", "MiB", "simulated", top=10), lambda axes: axes.get_ylim(), (0, 10)),
])  # fmt: skip
def test_what_is_drawn(figures, draw, found, wanted):
    draw()
    assert found(figures[0].axes[0]) == wanted


def test_layers_lie_on_each_other_below_the_names_of_the_phases(figures):
    layers = {"parameters": [2.0] * 40, "activations": [0.0] * 10 + [3.0] * 30}
    plots.stacked(layers, "A step", "events", "MiB", "simulated", [(0, "model"), (1, "forward"), (20, "backward")])
    (axes,) = figures[0].axes
    tops = [collection.get_datalim(axes.transData).y1 for collection in axes.collections]
    assert tops == [2.0, 5.0] and axes.get_ylim()[1] > 5
    assert texts(axes.texts) == ["forward", "backward"], "a phase of one event has no room for its name"
    assert legend(axes) == ["activations", "parameters"]


def test_a_long_title_is_not_cut_off(figures):
    plots.curves({"a": [1, 2]}, "Notebook 02's cut, 7 blocks: 388 ms, " * 4, "x", "y")
    figures[0].canvas.draw()
    assert figures[0]._suptitle.get_window_extent().x1 < figures[0].bbox.x1


def test_timelines_share_an_axis_of_time_and_a_legend(figures):
    """Each GPU's share is of its own timeline's time, and copies are not computing."""
    spans = [Span(0, 0, 1, "forward", "mm"), Span(0, 1, 2, "copy", "copy")]
    short = Timeline({"cuda:0": spans}, 2, "simulated")
    long = Timeline({"cuda:0": [*spans, Span(0, 2, 4, "backward", "mm")], "cuda:1": []}, 4, "simulated")
    plots.timelines({"pipeline": short, "in turns": long}, "They compare")
    above, below = figures[0].axes
    assert [axes.get_ylabel() for axes in (above, below)] == ["pipeline", "in turns"]
    assert [texts(axes.texts) for axes in (above, below)] == [["50 % computing"], ["75 % computing", "0 % computing"]]
    assert above.get_xlim() == below.get_xlim() == (0, 4000)
    assert legend(above) == ["forward", "copy", "backward"] and below.get_legend() is None


def test_a_slider_holds_a_picture_for_each_value(shown):
    def draw(n):
        plots.bars({"a": n}, f"{n} <of> them", "number", "data")

    plots.slider(draw, {"one": 1, "two": 2}, "how many", start=1)
    ((bundle, metadata),) = shown
    page = bundle["text/html"]
    assert page.count("<img ") == 2 == page.count("data:image/png;base64,") == page.count("<details ")
    assert 'alt="Figure (data): 1 &lt;of&gt; them"' in page
    assert page.count(" open>") == 1 and '<details data-value="two" open><summary>how many: two</summary>' in page
    assert "hidden" not in page and not re.search(r"<[^>]* on\w+=", page), "what an untrusted page would lack"
    assert bundle["text/plain"] == metadata["image/png"]["alt"] == "Figure (data): 2 <of> them"
    assert f'src="data:image/png;base64,{bundle["image/png"]}">' in page
    assert Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).mode == "P", "few colours, small files"
    with pytest.raises(ValueError, match="a slider over 2 values needs as many pictures, one a value; 0 were drawn"):
        plots.slider(lambda n: None, [1, 2], "how many")
    plots.bars({"a": 1}, "a picture", "number", "data")  # afterwards pictures go into their cells again
    assert len(shown) == 2
