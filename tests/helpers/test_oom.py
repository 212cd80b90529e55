"""An error that notebook 06 forgets, and what it kept alive."""

import subprocess
import sys
import textwrap

import pytest
import torch

from helpers import forget_error

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
