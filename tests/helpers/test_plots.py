"""Figures: drawn from data with gaps, labelled, and described in words."""

import base64
import io
import itertools
import math
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import helpers
import virtualgpu
from helpers import data, plots
from helpers.plots import devices
from helpers.plots import figures as drawing
from notebooks.figures import lesson_01, lesson_02, lesson_03, lesson_04, lesson_05
from virtualgpu.monitor import Reading, Source
from virtualgpu.run.fit import table
from virtualgpu.run.fit.search import Trial
from virtualgpu.timeline import Timeline, row
from virtualgpu.timing.clock import Span


@pytest.fixture
def shown(monkeypatch):
    """What plots hands to the cell: a list of (bundle, metadata)."""
    found = []
    monkeypatch.setattr(drawing, "display", lambda bundle, raw, metadata: found.append((bundle, metadata)))
    return found


@pytest.fixture
def figures(monkeypatch, shown):
    """The figures that were drawn."""
    found, canvas = [], drawing.FigureCanvasAgg
    monkeypatch.setattr(drawing, "FigureCanvasAgg", lambda figure: found.append(figure) or canvas(figure))
    return found


def lines(figure):
    """Each line's name, and its points."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}


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
    """And an iteration without one does not."""
    plots.utilization(watched(), "t")
    drawn = lines(figures[0])
    x, y = drawn["cuda:0"]
    assert x == [0, 3, 6], "only the iterations in which a reading was due"
    assert y[0] == 90 and math.isnan(y[1]) and y[2] == 80
    assert drawn["cuda:1"] == ([0, 3, 6], [40, 50, 45])


def test_bars_are_drawn_largest_on_top(figures):
    plots.bars({"small": 1, "large": 5}, "title", "MiB", "simulated")
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["small", "large"]  # from below


def test_bars_that_are_kept_stand_as_given_with_a_color_for_each_kind(figures):
    plots.bars({"one": 1, "many, 0": 5, "many, 1": 3}, "title", "MiB", "simulated", kept=True)
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["many, 1", "many, 0", "one"]  # from below
    second, first, one = (bar.get_facecolor() for bar in axes.patches)
    assert first == second != one


def test_a_sweeps_axis_begins_where_it_is_told_to(figures):
    plots.sweep([1, 2], {"a": [90, 95]}, "title", "GPUs", "%", "simulated", ylim=(0, 100))
    assert figures[0].axes[0].get_ylim() == (0, 100)


def test_points_have_the_color_of_the_line_that_they_name(figures):
    points = {"formula, b": {1: 2}, "others": {2: 3}}
    plots.sweep([1, 2], {"a": [1, 2], "b": [3, 4]}, "title", "GPUs", "%", "simulated", points=points)
    a, b, formula, others = (line.get_color() for line in figures[0].axes[0].lines)
    assert formula == b
    assert others not in (a, b)


def test_numbered_collectives_show_their_numbers(figures):
    spans = [Span(0, start, start + 1, "communication", "all_reduce") for start in range(3)]
    plots.timeline(Timeline.of_ranks([spans], number="all_reduce"), "Three buckets")
    assert [text.get_text() for text in figures[0].axes[0].texts][:3] == ["0", "1", "2"]


def test_phases_stand_over_what_they_name(figures):
    """The copies of a step of DataParallel's, between what its replicas compute."""
    own = [Span(0, 9, 10, "optimizer", "step")]
    other = [Span(1, 1, 2, "forward", "a"), Span(1, 4, 6, "backward", "b")]
    step = Timeline({"cuda:0": row(own, 0, 10), "cuda:1": row(other, 0, 10)}, 10, "simulated")
    plots.timeline(step, "A step", phases=lesson_04.phases(step))
    named = {text.get_text(): text.get_position()[0] for text in figures[0].axes[0].texts if text.get_text()}
    middles = {
        "replicate": 500,
        "forward": 1500,
        "gather, loss, scatter": 3000,
        "backward": 5000,
        "reduce": 7500,
        "optimizer": 9500,
    }
    assert middles.items() <= named.items()


def test_a_long_title_is_not_cut_off(figures):
    plots.bars({"a": 1.0}, "Notebook 02's cut, 7 blocks: 388 ms, " * 4, "ms", "simulated")
    figures[0].canvas.draw()
    assert figures[0]._suptitle.get_window_extent().x1 < figures[0].bbox.x1


def test_the_search_plot_rings_the_best(figures):
    lesson_05.search({"a": [(0.1, 8, 50), (1, 16, 70)], "b": [(0.5, 8, 90)]}, "title", "x", "y", "z")
    panels = figures[0].axes[:2]
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    assert [axes.texts[0].get_text() for axes in panels] == ["70", "90"]


def test_a_stopped_trial_has_a_cross_and_a_named_one_its_rest_dotted(figures):
    lesson_05.rungs([[3, 2, 1], [3, 3, 3], [3, 3, 3]], [1, 3, 1], [1, 2], "title", "loss", {0: "late"}, ylim=(0, 4))
    lines = figures[0].axes[0].lines
    assert [line.get_marker() for line in lines].count("x") == 2
    (rest,) = [line for line in lines if line.get_linestyle() == ":"]
    assert list(rest.get_ydata()) == [3, 2, 1]
    (named,) = figures[0].axes[0].get_legend().legend_handles
    assert named.get_linestyle() == ":"
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["1 go on", "1 go on"]


def test_workers_are_rows_and_their_bars_end_with_the_picture(figures):
    schedules = {
        "halving": [(0, 0, 0, 2, 1, False), (1, 1, 0, 1, 1, True)],
        "ASHA": [(0, 0, 0, 2, 1, False), (1, 1, 0, 1, 1, True), (1, 2, 1, 5, 2, True)],
    }
    lesson_05.workers(schedules, "title", "minutes", end=2)
    panels = figures[0].axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "halving: workers busy 75 % of the time",
        "ASHA: workers busy 100 % of the time",
    ]
    assert [len(axes.patches) for axes in panels] == [2, 3]
    assert [len(axes.lines) for axes in panels] == [1, 1], "a stop beyond the picture's end is not to be seen"
    assert panels[0].get_xlim() == (0, 2)


class Bar(NamedTuple):
    """As of notebooks/scripts/tuning.py, which needs Ray."""

    process: int
    trial: str
    start: float
    end: float
    rounds: int
    stopped: bool


def test_trials_are_bars_of_their_process_and_those_that_were_stopped_have_an_end(figures):
    bars = [(71, "a", 0.0, 2.0, 16, False), (70, "b", 0.0, 1.0, 4, True), (70, "c", 1.0, 3.0, 8, True)]
    lesson_05.trials([Bar(*bar) for bar in bars], "title")
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == ["16", "4", "8"] and len(axes.lines) == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["GPU process 0", "GPU process 1"]


def test_digits_that_a_network_misses_are_drawn_with_both_numbers(figures):
    images, labels = torch.zeros(5, 1, 8, 8), torch.tensor([1, 2, 3, 4, 5])
    lesson_05.missed(images, labels, torch.tensor([1, 7, 3, 4, 0]), "title", count=4)
    assert [axes.get_title() for axes in figures[0].axes] == ["2, not 7", "5, not 0", "", ""]


@pytest.mark.parametrize("disabled", [None, "1"])
def test_the_bar_is_drawn_unless_disabled(monkeypatch, disabled):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if disabled:
        monkeypatch.setenv("TQDM_DISABLE", disabled)
    bar = helpers.progress(range(3), "epochs")
    assert bar.disable == bool(disabled) and list(bar) == [0, 1, 2]


def test_a_pipelines_bars_have_the_numbers_of_their_micro_batches(figures):
    def part(start, stage, way, number):
        kind = "forward" if way == "F" else "backward"
        return Span(0, start, start + 1, kind, "mm", annotation=f"PP:{stage}{way}{number}")

    spans = [part(0, 0, "F", 0), part(1, 0, "F", 1), part(2, 0, "B", 0), part(3, 0, "B", 1)]
    plots.timeline(Timeline({"cuda:0": row(spans, 0, 4)}, 4, "simulated"), "Two micro-batches")
    drawn = [(text.get_text(), text.get_position()) for text in figures[0].axes[0].texts[:4]]
    assert drawn == [("0", (500, 0)), ("1", (1500, 0)), ("0", (2500, 0)), ("1", (3500, 0))]


def test_timelines_share_an_axis_of_time_and_a_legend(figures):
    """Each GPU's share is of its own timeline's time, and copies are not computing."""
    spans = [Span(0, 0, 1, "forward", "mm"), Span(0, 1, 2, "copy", "copy")]
    short = Timeline({"cuda:0": spans}, 2, "simulated")
    long = Timeline({"cuda:0": [*spans, Span(0, 2, 4, "backward", "mm")], "cuda:1": []}, 4, "simulated")
    plots.timelines({"pipeline": short, "in turns": long}, "They compare")
    above, below = figures[0].axes
    assert [axes.get_ylabel() for axes in (above, below)] == ["pipeline", "in turns"]
    assert [[text.get_text() for text in axes.texts] for axes in (above, below)] == [
        ["50 % computing"],
        ["75 % computing", "0 % computing"],
    ]
    assert above.get_xlim() == below.get_xlim() == (0, 4000)
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["forward", "copy", "backward"]
    assert below.get_legend() is None


def test_a_schedule_has_what_each_stage_holds(figures):
    tables = {
        "GPipe": [["F0", "F1", None, None, "B0", "B1"], [None, "F0", "F1", "B0", "B1", None]],
        "1F1B": [["F0", "F1", None, "B0", None, "B1"], [None, "F0", "B0", "F1", "B1", None]],
    }
    lesson_03.schedules(tables, "They hold")
    held = [[label.get_text() for label in axes.get_yticklabels()] for axes in figures[0].axes]
    assert held == [["stage 0, holds 2", "stage 1, holds 2"], ["stage 0, holds 2", "stage 1, holds 1"]]


@pytest.mark.parametrize(
    "names", [("all_gather 16 MiB", "reduce_scatter 16 MiB"), ("ncclAllGather_RING", "ncclReduceScatter_RING")]
)
def test_gathers_and_reduce_scatters_that_follow_each_other_have_a_color_each(figures, names):
    spans = [Span(0, start, start + 1, "communication", names[start % 2], 7) for start in range(4)]
    plots.timeline(Timeline({"rank 0": row(spans, 0, 4)}, 4, "simulated"), "A step of FSDP")
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all-gather", "reduce-scatter"]
    drawn = {bars.get_label(): len(bars.get_paths()) for bars in axes.collections if bars.get_paths()}
    assert drawn == {"all-gather": 2, "reduce-scatter": 2}
    assert axes.texts[-1].get_text() == "0 % computing"


def test_waiting_for_other_ranks_is_drawn_as_waiting(figures):
    parts = [("forward", 0, 1), ("waiting", 1, 3), ("communication", 3, 4)]
    spans = [Span(0, start, end, kind, kind, 7 * (kind != "forward")) for kind, start, end in parts]
    plots.timeline(Timeline({"rank 0": row(spans, 0, 4)}, 4, "simulated"), "It waits")
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "waiting", "communication"]
    assert axes.texts[-1].get_text() == "25 % computing"
    grey = next(bars for bars in axes.collections if bars.get_label() == "waiting").get_facecolor()[0]
    assert len(set(grey[:3])) == 1 and 0.5 < grey[0] < 0.8


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


def test_a_ranks_row_without_work_and_a_table_without_slots(figures):
    late = Span(0, 10, 11, "backward", "mm", annotation="PP:0W0")
    plots.timeline(Timeline.of_ranks([[late], []], origin="simulated"), "Weights last")
    plots.timeline(Timeline.of_slots([]), "nothing", until=1.0)
    names = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert names == ["weight gradient"] and len(figures) == 2


def test_two_timelines_share_an_axis(figures):
    plots.timeline(Timeline.of_slots([["F0", "B0"]]), "short", until=0.005, xlabel="slots")
    assert figures[0].axes[0].get_xlim() == (0, 5) and figures[0].axes[0].get_xlabel() == "slots"


def test_a_drawing_has_its_boxes_and_arrows(figures):
    boxes = {"node": ("a node", 0, 0, 5, 2, 4), "0": ("GPU 0", 0.5, 0.5, 1, 1, 0), "1": ("GPU 1", 3, 0.5, 1, 1, 1)}
    lesson_02.drawing(boxes, [("0", "<1", "a link")], "two GPUs")
    (axes,) = figures[0].axes
    words = {text.get_text(): text for text in axes.texts}
    assert {"a node", "GPU 0", "GPU 1", "a link"} <= words.keys()
    assert words["a node"].get_va() == "top" and words["GPU 0"].get_va() == "center"
    (arrow,) = (text for text in axes.texts if getattr(text, "arrow_patch", None))
    assert arrow.xy == (3, 1.0)


def test_all_cuts_stand_above_each_other_and_some_are_named(figures, shown):
    peaks, times = {1: (100, 300), 2: (200, 200), 3: (300, 100)}, {1: 9.0, 2: 7.0, 3: 8.0}
    lesson_02.cuts(peaks, times, 1024, {2: "even", 3: "last"}, "Two are even")
    memory, clock = figures[0].axes
    assert [list(line.get_ydata()) for line in memory.lines[:2]] == [[100, 200, 300], [300, 200, 100]]
    assert list(clock.lines[0].get_xdata()) == [1, 2, 3] and list(clock.lines[0].get_ydata()) == [9, 7, 8]
    assert [(text.get_text(), text.xy) for text in clock.texts] == [("even", (2, 7.0)), ("last", (3, 8.0))]
    assert [text.get_text() for text in memory.texts] == ["1 GiB"]


def test_what_fit_tried_stands_beside_the_cards_memory():
    some = Trial("T4", 1, {"batch-size": "8"}, "fits", 4 << 30, 16 << 30, 0.5, 1, samples=8, used=1)
    full = some._replace(values={"batch-size": "64"}, status="out of memory", step=None, samples=None)
    _, (memory, speed) = drawing.new(ncols=2)
    table.draw(memory, speed, [some, full, some._replace(card="L4", gpus=2, samples=16)], drawing.COLORS)
    assert [text.get_text() for text in memory.get_yticklabels()] == [
        "T4, batch-size 8",
        "T4, batch-size 64",
        "2 x L4, batch-size 8",
    ]
    assert [bar.get_width() for bar in memory.patches] == [4, 4, 4] and [
        line.get_xdata()[0] for line in memory.lines
    ] == [16] * 3
    assert "out of memory" in [text.get_text() for text in speed.texts]
    assert [bar.get_width() for bar in speed.patches] == [16, 32] and "samples" in speed.get_xlabel()


def test_the_numbers_below_what_fit_tried_find_room():
    fast = Trial("T4", 1, {}, "fits", 4 << 30, 16 << 30, 0.5, 1, samples=50_000, used=1)
    figure, (memory, speed) = drawing.new(ncols=2)
    table.draw(memory, speed, [fast], drawing.COLORS)
    drawing.FigureCanvasAgg(figure).draw()
    labels = [label.get_window_extent() for label in speed.get_xticklabels() if label.get_text()]
    assert len(labels) > 2 and all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))


def test_each_kind_of_work_has_a_color_of_its_own():
    """But for "kernel", which stands where a profiler cannot tell what a kernel is for."""
    colors = [color for kind, color in devices.KINDS.items() if kind != "kernel"]
    assert len(set(colors)) == len(colors)
