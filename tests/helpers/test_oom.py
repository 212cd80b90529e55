"""An error that notebook 06 forgets, and what it kept alive."""

import json
import sys
import textwrap

import pytest
import torch

from helpers import forget_error
from tests import forks

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("gpu")


FAILS = """
import helpers, torch, virtualgpu
virtualgpu.gpus(1, memory="64 MB")

def grow(x):
    layers = [x]
    while True:
        layers.append(torch.relu(layers[-1]))

grow(torch.zeros(1 << 20, device="cuda"))
"""


CAUGHT = FAILS.replace("\ngrow(", "\ntry:\n    grow(").rstrip() + (
    "\nexcept torch.OutOfMemoryError:\n    get_ipython().showtraceback()\n"
    "helpers.forget_error()\nprint(torch.cuda.memory_allocated())"
)
CELLS = {
    "fails": FAILS,
    "collects": "import gc; gc.collect(); torch.cuda.empty_cache(); print(torch.cuda.memory_allocated())",
    "forgets": "helpers.forget_error(); import sys; print(torch.cuda.memory_allocated(), hasattr(sys, 'last_value'))",
    "fails again": FAILS,
    "forgets at once": "helpers.forget_error(); print(torch.cuda.memory_allocated())",
    "fails and forgets": CAUGHT,
}


@pytest.fixture(scope="module")
def printed():
    """{cell: the last words that it printed}, run one after the other in an IPython shell of another process."""
    code = f"""
    import contextlib, io, json
    from IPython.core.interactiveshell import InteractiveShell
    shell, printed = InteractiveShell.instance(), {{}}
    for name, cell in {CELLS!r}.items():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            shell.run_cell(cell, store_history=True)
        printed[name] = said.getvalue().rstrip().rpartition("\\n")[2]
    print(json.dumps(printed))
    """
    done = forks.run("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_uncaught_error_keeps_its_tensors_until_it_is_forgotten(printed):
    assert int(printed["collects"]) > 40 * MIB and printed["forgets"] == "0 False"


def test_an_uncaught_error_is_forgotten_in_the_very_next_cell(printed):
    """IPython keeps it in the result of the last cell, too, until another cell has ended."""
    assert printed["forgets at once"] == "0"


def test_forgetting_in_the_cell_that_failed_works_too(printed):
    assert printed["fails and forgets"] == "0"


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
