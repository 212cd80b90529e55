"""What a cell needs beside PyTorch: a bar, and an error that is forgotten with what it kept alive."""

import json
import sys
import textwrap

import pytest
import torch

import helpers
from tests import forks

MIB = 1 << 20


@pytest.mark.parametrize("disabled", [None, "1"])
def test_the_bar_is_drawn_unless_disabled(monkeypatch, disabled):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if disabled:
        monkeypatch.setenv("TQDM_DISABLE", disabled)
    bar = helpers.progress(range(3), "epochs")
    assert bar.disable == bool(disabled) and list(bar) == [0, 1, 2]


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
    "fails again": FAILS,  # IPython keeps an error in the result of the last cell, too, until another cell has ended
    "forgets": "helpers.forget_error(); import sys; print(torch.cuda.memory_allocated(), hasattr(sys, 'last_value'))",
    "fails and forgets": CAUGHT,
}


def test_an_uncaught_error_keeps_its_tensors_until_it_is_forgotten():
    """The last words of each cell, run one after the other in an IPython shell of another process."""
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
    printed = json.loads(done.stdout.splitlines()[-1])
    assert int(printed["collects"]) > 40 * MIB
    assert (printed["forgets"], printed["fails and forgets"]) == ("0 False", "0")


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
    helpers.forget_error()
    assert torch.cuda.memory_allocated() == 0
