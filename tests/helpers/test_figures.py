"""What one lesson alone draws, notebooks/figures, and what lies beside it there: a recorder of memory, Adam in 8 bits."""

import pytest
import torch

from helpers import plots
from notebooks.figures import lesson_02, lesson_03, lesson_04, lesson_05, lesson_06, lesson_07
from virtualgpu.timeline import Timeline, row
from virtualgpu.timing.clock import Span

MIB = 1 << 20


def words(artists):
    return [text.get_text() for text in artists]


def test_all_cuts_stand_above_each_other_and_some_are_named(figures):
    peaks, times = {1: (100, 300), 2: (200, 200), 3: (300, 100)}, {1: 9.0, 2: 7.0, 3: 8.0}
    lesson_02.cuts(peaks, times, 1024, {2: "even", 3: "last"}, "Two are even")
    memory, clock = figures[0].axes
    assert [list(line.get_ydata()) for line in memory.lines[:2]] == [[100, 200, 300], [300, 200, 100]]
    assert clock.lines[0].get_xydata().tolist() == [[1, 9], [2, 7], [3, 8]]
    assert [(text.get_text(), text.xy) for text in clock.texts] == [("even", (2, 7.0)), ("last", (3, 8.0))]
    assert words(memory.texts) == ["1 GiB"]


def test_a_schedule_has_what_each_stage_holds(figures):
    tables = {
        "GPipe": [["F0", "F1", None, None, "B0", "B1"], [None, "F0", "F1", "B0", "B1", None]],
        "1F1B": [["F0", "F1", None, "B0", None, "B1"], [None, "F0", "B0", "F1", "B1", None]],
    }
    lesson_03.schedules(tables, "They hold")
    held = [words(axes.get_yticklabels()) for axes in figures[0].axes]
    assert held == [["stage 0, holds 2", "stage 1, holds 2"], ["stage 0, holds 2", "stage 1, holds 1"]]


def test_phases_stand_over_what_they_name(figures):
    """The copies of a step of DataParallel's, between what its replicas compute."""
    own = [Span(0, 9, 10, "optimizer", "step")]
    other = [Span(1, 1, 2, "forward", "a"), Span(1, 4, 6, "backward", "b")]
    step = Timeline({"cuda:0": row(own, 0, 10), "cuda:1": row(other, 0, 10)}, 10, "simulated")
    plots.timeline(step, "A step", phases=lesson_04.phases(step))
    named = {text.get_text(): text.get_position()[0] for text in figures[0].axes[0].texts}
    middles = {"replicate": 500, "forward": 1500, "gather, loss, scatter": 3000, "backward": 5000, "reduce": 7500}
    assert middles.items() <= named.items()


def test_a_stopped_trial_has_a_cross_and_a_named_one_its_rest_dotted(figures):
    lesson_05.rungs([[3, 2, 1], [3, 3, 3], [3, 3, 3]], [1, 3, 1], [1, 2], "title", "loss", {0: "late"}, ylim=(0, 4))
    lines = figures[0].axes[0].lines
    assert [line.get_marker() for line in lines].count("x") == 2
    (rest,) = [line for line in lines if line.get_linestyle() == ":"]
    assert list(rest.get_ydata()) == [3, 2, 1]
    (named,) = figures[0].axes[0].get_legend().legend_handles
    assert named.get_linestyle() == ":" and words(figures[0].axes[0].texts) == ["1 go on", "1 go on"]


def test_workers_are_rows_and_their_bars_end_with_the_picture(figures):
    halving = [(0, 0, 0, 2, 1, False), (1, 1, 0, 1, 1, True)]
    lesson_05.workers({"halving": halving, "ASHA": [*halving, (1, 2, 1, 5, 2, True)]}, "title", "minutes", end=2)
    panels = figures[0].axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "halving: workers busy 75 % of the time",
        "ASHA: workers busy 100 % of the time",
    ]
    assert [len(axes.patches) for axes in panels] == [2, 3] and panels[0].get_xlim() == (0, 2)
    assert [len(axes.lines) for axes in panels] == [1, 1], "a stop beyond the picture's end is not to be seen"


def test_segments_of_a_row_follow_each_other_block_by_block(figures):
    used, free = {"state": "active_allocated", "size": 2 * MIB}, {"state": "inactive", "size": 18 * MIB}
    small = {"total_size": 20 * MIB, "blocks": [used, free]}
    large = {"total_size": 64 * MIB, "blocks": [used | {"size": 64 * MIB}]}
    lesson_06.blocks({"one": [small], "two": [small, large]}, "Gaps", "simulated")
    (axes,) = figures[0].axes
    assert axes.get_xlim() == (0, 84)
    assert words(axes.texts) == ["18", "18", "64"], "a narrow block has no number"
    widths = [[path.get_extents().width for path in bars.get_paths()] for bars in axes.collections]
    assert widths == [[2], [18], [2], [18], [64]]
    assert words(axes.get_legend().get_texts()) == ["in use", "free"]


def test_each_climb_ends_in_the_error_below_the_same_ceiling(figures):
    lesson_06.climbs({"a batch": [0, 8, 16], "a leak": [0, 4, 2, 6]}, 20, "Two causes", "simulated")
    for axes, name, held in zip(figures[0].axes, ("a batch", "a leak"), ([0, 8, 16], [0, 4, 2, 6]), strict=True):
        curve, ceiling, cross = axes.lines
        assert axes.get_title(loc="left") == name
        assert [*curve.get_ydata()] == held and set(ceiling.get_ydata()) == {20}
        assert cross.get_xydata().tolist() == [[len(held) - 1, held[-1]]]


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
    assert words(axes.texts) == ["2.0", "5.0", "4.0"], "what is thin has no number"
    assert words(axes.get_legend().get_texts()) == ["a", "b"]


@pytest.fixture
def prices():
    """Of four cures: "dear" is beaten by "small", and "other" is a different training run."""
    found = lesson_07.PriceList.__new__(lesson_07.PriceList)
    kinds = "exact", "rounded", "exact", "approximate", lesson_07.OTHER
    points = (1.0, 10.0), (0.5, 8.0), (2.0, 9.0), (1.5, 4.0), (0.4, 1.0)
    found.kinds = dict(zip(("as it is", "fast", "dear", "small", "other"), kinds, strict=True))
    found.rows = {name: dict.fromkeys(lesson_07.PATIENTS, at) for name, at in zip(found.kinds, points, strict=True)}
    return found


def test_the_frontier_joins_what_nothing_beats_in_time_and_memory(figures, prices):
    assert [lesson_07.kind(off) for off in (1e-6, 0.002, 0.05)] == ["exact", "rounded", "approximate"]
    assert lesson_07.frontier([(2, 1), (1, 2), (3, 1), (1, 3)]) == [(1, 2), (2, 1)]
    lesson_07.scatter(prices, "Cures")
    for axes in figures[0].axes:
        assert axes.lines[0].get_xydata().tolist() == [[0.5, 8.0], [1.5, 4.0]], "not the different training run"
        assert words(axes.texts) == ["1", "2", "3", "4", "5"]
    assert words(figures[0].legends[0].get_texts())[1] == "2  fast"


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


@pytest.mark.parametrize("message, said", [
    # PyTorch 2.15, the last sentence left out
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 256.00 MiB of which 8.00 MiB is free. Process 7 has "
     "100.00 MiB memory in use. Process 8 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 20.00 MiB memory in "
     "use. 64.00 MiB allowed; Of the allocated memory 512 bytes is allocated by PyTorch, and 1.00 KiB is reserved by PyTorch but unallocated.",
     {"tried": 20, "capacity": 256, "free": 8, "Process N": 1124, "this process": 20, "tensors": 2**-11, "unused": 2**-10}),
    # PyTorch 1.2: github.com/pytorch/pytorch/issues/40002
    ("CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 6.00 GiB total capacity; 693.78 MiB already allocated; 3.91 GiB free; "
     "18.22 MiB cached)", {"tried": 50, "capacity": 6144, "free": 4003.84, "tensors": 693.78}),
    (lesson_06.QUOTED["Stripformer#21"], {"tried": 1689.6, "capacity": 7976.96, "free": 1433.6, "tensors": 3614.72, "reserved": 5406.72}),
    ("CUDA out of memory. Tried to allocate more than 1EB memory.", {}),
])  # fmt: skip
def test_numbers_of_a_message(message, said):
    assert lesson_06.sizes(message) == pytest.approx(said)
