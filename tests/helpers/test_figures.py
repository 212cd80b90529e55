"""What one lesson alone draws, notebooks/figures, and what lies beside it there: a recorder of memory, Adam in 8 bits."""

import pytest
import torch

from helpers import plots
from notebooks.figures import lesson_03, lesson_04, lesson_05, lesson_06, lesson_07
from virtualgpu.timeline import Timeline, row
from virtualgpu.timing.clock import Span

MIB = 1 << 20


def words(artists):
    return [text.get_text() for text in artists]


def test_phases_stand_over_what_they_name(figures):
    """The copies of a step of DataParallel's, between what its replicas compute."""
    own = [Span(0, 9, 10, "optimizer", "step")]
    other = [Span(1, 1, 2, "forward", "a"), Span(1, 4, 6, "backward", "b")]
    step = Timeline({"cuda:0": row(own, 0, 10), "cuda:1": row(other, 0, 10)}, 10, "simulated")
    plots.timeline(step, "A step", phases=lesson_04.phases(step))
    named = {text.get_text(): text.get_position()[0] for text in figures[0].axes[0].texts}
    middles = {"replicate": 500, "forward": 1500, "gather, loss, send back": 3000, "backward": 5000, "reduce": 7500}
    assert middles.items() <= named.items()


BLOCKS = {"state": "active_allocated", "size": 2 * MIB}, {"state": "inactive", "size": 18 * MIB}
SEGMENT = {"total_size": 20 * MIB, "blocks": [*BLOCKS]}
HALVING = [(0, 0, 0, 2, 1, False), (1, 1, 0, 1, 1, True)]
SCHEDULES = {
    "GPipe": [["F0", "F1", None, None, "B0", "B1"], [None, "F0", "F1", "B0", "B1", None]],
    "1F1B": [["F0", "F1", None, "B0", None, "B1"], [None, "F0", "B0", "F1", "B1", None]],
}


@pytest.mark.parametrize("draw, found, wanted", [
    # the micro-batches that a stage holds
    (lambda: lesson_03.schedules(SCHEDULES, "They hold"), lambda axes: [words(each.get_yticklabels()) for each in axes],
     [["stage 0, holds 2", "stage 1, holds 2"], ["stage 0, holds 2", "stage 1, holds 1"]]),
    # a stop beyond the picture's end is not to be seen
    (lambda: lesson_05.workers({"halving": HALVING, "ASHA": [*HALVING, (1, 2, 1, 5, 2, True)]}, "title", "minutes", end=2),
     lambda axes: [(each.get_title(loc="left"), len(each.patches), len(each.lines)) for each in axes],
     [("halving: workers busy 75 % of the time", 2, 1), ("ASHA: workers busy 100 % of the time", 3, 1)]),
    # segments of a row follow each other, block by block; a narrow one has no number
    (lambda: lesson_06.blocks({"one": [SEGMENT], "two": [SEGMENT, {"total_size": 64 * MIB, "blocks": [BLOCKS[0] | {"size": 64 * MIB}]}]}, "Gaps", "simulated"),
     lambda axes: (words(axes[0].texts), [[path.get_extents().width for path in bars.get_paths()] for bars in axes[0].collections]),
     (["18", "18", "64"], [[2], [18], [2], [18], [64]])),
])  # fmt: skip
def test_what_is_drawn(figures, draw, found, wanted):
    draw()
    assert found(figures[0].axes) == wanted


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


def test_what_the_price_list_says():
    layers = {"parameters": [2.0, 2.0, 2.0], "activations": [0.0, 5.0, 1.0]}
    assert lesson_07.at_the_peak(layers) == {"parameters": 2.0, "activations": 5.0}
    assert lesson_07.frontier([(2, 1), (1, 2), (3, 1), (1, 3)]) == [(1, 2), (2, 1)]
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
