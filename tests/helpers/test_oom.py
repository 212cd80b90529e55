"""What notebook 06 uses: an error forgotten, a neighbour on the GPU, the curve of what tensors hold."""

import subprocess
import sys
import textwrap

import pytest
import torch

import virtualgpu
from helpers import Monitor, forget_error, kinds, other_process

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("gpu")


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


def test_an_uncaught_error_is_forgotten_in_the_very_next_cell():
    """IPython keeps it in the result of the last cell, too, until another cell has ended."""
    assert in_a_shell(FAILS, "helpers.forget_error(); print(torch.cuda.memory_allocated())") == ["0"]


def test_forgetting_in_the_cell_that_failed_works_too():
    caught = FAILS.replace("\ngrow(", "\ntry:\n    grow(").rstrip() + (
        "\nexcept torch.OutOfMemoryError:\n    get_ipython().showtraceback()\n"
        "helpers.forget_error()\nprint(torch.cuda.memory_allocated())"
    )
    assert in_a_shell(caught)[-1] == "0"


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


def test_two_other_processes_at_once(gpu):
    """Also where what others hold is asked of a function, as under the runner."""
    virtualgpu.machine().gpus[0].memory.others = lambda: 50 * MIB
    assert torch.cuda.mem_get_info()[0] == 206 * MIB
    with other_process(leave="100 MB"):
        with other_process(leave="20 MB"):
            assert torch.cuda.mem_get_info()[0] == 20 * MIB
        assert torch.cuda.mem_get_info()[0] == 100 * MIB
    assert torch.cuda.mem_get_info()[0] == 206 * MIB


class Trace:
    """A snapshot's trace, written by hand: sizes in MiB."""

    def __init__(self):
        self.events = []

    def alloc(self, address, size):
        self.events.append({"action": "alloc", "addr": address, "size": size * MIB})

    def free(self, address):
        self.events += [{"action": f"free_{when}", "addr": address, "size": 0} for when in ("requested", "completed")]


def test_what_a_step_held_is_told_by_phase_and_by_what_outlives_it():
    trace, phases = Trace(), []
    phases.append((0, "model"))
    trace.alloc(1, 8)
    phases.append((1, "forward"))
    trace.alloc(2, 4)  # goes within forward
    trace.alloc(3, 2)
    trace.free(2)
    phases.append((len(trace.events), "backward"))
    trace.alloc(2, 8)  # the same place again
    trace.free(3)
    phases.append((len(trace.events), "optimizer"))
    trace.alloc(4, 16)
    trace.free(2)
    trace.free(99)  # made before it was recorded
    found = kinds(trace.events, phases)
    assert found == {
        "parameters": [8.0] * 13,
        "activations": [0, 0, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 0, 0, 0],
        "optimizer state": [0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16],
        "temporary": [0, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    }


def test_what_was_held_sums_up_to_what_the_allocator_says(gpu):
    torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
    layer = torch.nn.Linear(512, 512, device=gpu)
    phases = [(0, "model"), (len(torch.cuda.memory._snapshot()["device_traces"][0]), "forward")]
    loss = layer(torch.ones(256, 512, device=gpu)).square().sum()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    last = sum(row[-1] for row in kinds(trace, phases).values())
    assert last == pytest.approx(torch.cuda.memory_allocated() / MIB, abs=0.01) and loss.item() > 0
