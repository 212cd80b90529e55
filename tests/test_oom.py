"""What notebook 06 uses: an error forgotten, a neighbour on the GPU, the curve of what tensors hold, the riddle and graders."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checks
import virtualgpu
from helpers import Monitor, forget_error, other_process, plots

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    (device,) = virtualgpu.gpus(1, memory="256 MB")
    yield device
    virtualgpu.reset()


def in_a_shell(*cells):
    """Run cells in an IPython shell of another process; what the last one prints."""
    code = f"""
    import contextlib, io
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for cell in {[textwrap.dedent(cell) for cell in cells]!r}:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            shell.run_cell(cell, store_history=True)
    print(said.getvalue(), end="")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FAILS = """
import helpers, torch
helpers.gpus(1, memory="64 MB")

def grow(x):
    layers = [x]
    while True:
        layers.append(torch.relu(layers[-1]))

grow(torch.zeros(1 << 20, device="cuda"))
"""


def test_an_uncaught_error_keeps_its_tensors_until_it_is_forgotten():
    before, after, sys_last = in_a_shell(
        FAILS,
        "import gc; gc.collect(); torch.cuda.empty_cache(); before = torch.cuda.memory_allocated()",
        "helpers.forget_error(); import sys; print(before, torch.cuda.memory_allocated(), hasattr(sys, 'last_value'))",
    )
    assert int(before) > 40 * MIB and int(after) == 0 and sys_last == "False"


def test_forgetting_in_the_cell_that_failed_works_too():
    caught = FAILS.replace("\ngrow(", "\ntry:\n    grow(").rstrip() + (
        "\nexcept torch.OutOfMemoryError:\n    get_ipython().showtraceback()\n"
        "helpers.forget_error()\nprint(torch.cuda.memory_allocated())"
    )
    assert in_a_shell(caught)[-1] == "0"


def test_forget_error_without_an_error_and_without_ipython():
    forget_error()
    forget_error()


def test_an_error_raised_from_another_gives_both_back(gpu):
    def inner():
        held = torch.zeros(MIB, device=gpu)
        raise ValueError(held.shape)

    def outer():
        also = torch.zeros(MIB, device=gpu)
        try:
            inner()
        except ValueError as error:
            raise RuntimeError(also.shape) from error

    try:
        outer()
    except RuntimeError as error:
        sys.last_value = error
    assert torch.cuda.memory_allocated() == 8 * MIB
    forget_error()
    assert torch.cuda.memory_allocated() == 0


def test_another_process_leaves_what_it_is_told_to_and_goes(gpu):
    held = torch.zeros(MIB, device=gpu)
    free = torch.cuda.mem_get_info()[0]
    with other_process(leave="20 MB"):
        assert torch.cuda.mem_get_info() == (20 * MIB, 256 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"of which 20.00 MiB is free.*this process has 20.00 MiB"):
            torch.zeros(20 * MIB, device=gpu)
    assert torch.cuda.mem_get_info()[0] == free
    with pytest.raises(KeyError), other_process(leave="20 MB"):
        raise KeyError
    assert torch.cuda.mem_get_info()[0] == free
    with other_process(leave="1 GB"):  # there is less: it takes nothing
        assert torch.cuda.mem_get_info()[0] == free
    assert held.nbytes == torch.cuda.memory_allocated()


def test_the_monitor_tells_what_tensors_hold_beside_what_is_reserved(gpu):
    kept = []
    with Monitor() as monitor:
        for _ in range(3):
            kept.append(torch.zeros(MIB, device=gpu))
            monitor.step()
    assert monitor.allocated() == {"cuda:0": [4 * MIB, 8 * MIB, 12 * MIB]}
    assert monitor.memory() == {"cuda:0": [20 * MIB] * 3}


def test_the_memory_plot_has_both_lines(gpu, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "_readings", lambda axes, monitor, table: drawn.update(table))
    monkeypatch.setattr(plots, "display", lambda *args, **kwargs: None)
    x = torch.zeros(MIB, device=gpu)
    with Monitor() as monitor:
        monitor.step()
    plots.memory(monitor, "title")
    assert drawn == {"cuda:0, in use": [20.0], "cuda:0, in tensors": [4.0]} and x.nbytes == 4 * MIB
    virtualgpu.reset()
    drawn.clear()
    with Monitor(interval=0.01) as monitor:
        monitor.step()
    plots.memory(monitor, "title")
    assert list(drawn) == [f"{device}, in use" for device in monitor.devices]


def test_bars_are_drawn_largest_on_top(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_show", lambda figure, title, origin: figures.append(figure))
    plots.bars({"small": 1, "large": 5}, "title", "MiB", "simulated")
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["small", "large"]  # from below


RIGHT = {"A": "graph kept", "B": "optimizer state", "C": "longer inputs", "D": "outputs kept"}


def test_the_riddles_curves_are_what_their_names_say(gpu):
    curves = checks.riddle(gpu)
    assert torch.cuda.memory_allocated() == 0
    steps = {name: [b - a for a, b in itertools.pairwise(curve)] for name, curve in curves.items()}
    assert min(steps["A"][1:]) == max(steps["A"][1:]) > 2  # whole graphs
    assert sorted(steps["B"])[-1] > 5 and max(sorted(steps["B"])[:-1]) < 0.01  # one jump
    assert min(steps["C"]) < -5
    assert min(steps["D"][1:]) == max(steps["D"][1:]) == 2048 * 64 * 4 / MIB  # outputs and nothing else


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RIGHT, "[passed]"),
        ({}, "A is not None"),
        (RIGHT | {"B": "graph kept"}, "B is not 'graph kept'. It starts at 18.0 MiB, grows in 1 of 11 iterations"),
        (RIGHT | {"C": "outputs kept"}, "and falls"),
        (RIGHT | {"D": "graph kept"}, "by 0.5 MiB at most, and never falls"),
    ],
)
def test_naming_the_causes_is_graded(gpu, capsys, answer, said):
    checks.causes(answer, checks.riddle(gpu))
    assert said in capsys.readouterr().out


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).to("cuda:0")


def whole(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.item()


def in_pieces(net, x, y, scale=1, result=True):
    total = 0
    for xs, ys in zip(x.chunk(8), y.chunk(8), strict=True):
        loss = F.cross_entropy(net(xs), ys) / 8
        (scale * loss).backward()
        total += loss.detach()
    return total if result else None


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (in_pieces, "[passed]"),
        (whole, "right gradients, and a peak of"),
        (lambda *a: in_pieces(*a, scale=8), "8.00 times as long"),
        (lambda *a: in_pieces(*a, result=False), "the loss should be 2.3"),
        (lambda net, x, y: 2.3, "some parameters have no gradient"),
        (lambda net, x, y: torch.zeros(1 << 30, device="cuda"), "your code raised OutOfMemoryError"),
    ],
)
def test_training_within_a_budget_is_graded(capsys, step, said):
    x, y = torch.randn(2048, 64), torch.arange(2048) % 10
    checks.within_budget(step, make_net, x, y, budget=4 * MIB)
    out = capsys.readouterr().out
    assert said in out, out
