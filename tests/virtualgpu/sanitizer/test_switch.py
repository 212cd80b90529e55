"""On and off: the with-block and the runner's option (those of pytest: test_plugin); while it is off, nothing is in the way."""

import os

import pytest
import torch

import virtualgpu
from tests import forks
from tests.virtualgpu.sanitizer.programs import RACES, run
from virtualgpu import session
from virtualgpu.engine.dispatch import Dispatch
from virtualgpu.engine.factories import Factories
from virtualgpu.engine.machine import GPU
from virtualgpu.sanitizer import UnsynchronizedAccessError
from virtualgpu.timing.clock import Clock

REPLACED = [(Dispatch, "_work"), (Factories, "make"), (Factories, "make_like"), (GPU, "malloc"), (GPU, "free")]
REPLACED += [(Clock, "wait"), (Clock, "wait_for"), (Clock, "between"), (Clock, "_enter_node")]


RACE = RACES["read after write"][0]


def methods() -> list:
    return [getattr(owner, name) for owner, name in REPLACED]


def test_off_nothing_is_in_the_way():
    virtualgpu.gpus(2)
    before = methods()
    with virtualgpu.sanitize():
        assert all(a is not b for a, b in zip(before, methods(), strict=True))
    assert methods() == before
    assert all(method.__module__.startswith("virtualgpu.engine") for method in before[:5])


def test_the_block():
    with (
        pytest.raises(RuntimeError, match=r"no virtual GPUs on which to look for races: call gpus\(\) first"),
        virtualgpu.sanitize(),
    ):
        pass
    virtualgpu.gpus(2)
    run(RACE, waits=False)
    with virtualgpu.sanitize():
        with pytest.raises(UnsynchronizedAccessError):
            run(RACE, waits=False)
        with virtualgpu.sanitize():
            pass
        virtualgpu.gpus(1)  # others, on which races are looked for, too
        with pytest.raises(UnsynchronizedAccessError):
            run(RACE, waits=False)
    run(RACE, waits=False)


def test_what_was_under_way_before_is_taken_to_be_done():
    virtualgpu.gpus(2)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(8, device="cuda")
    with virtualgpu.sanitize():
        assert x.sum().item() == 8
        with torch.cuda.stream(side):
            x.add_(1)
        with pytest.raises(UnsynchronizedAccessError):
            x.sum()
    with virtualgpu.sanitize():
        assert x.sum().item() == 16


SCRIPT = """
import torch
side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
with torch.cuda.stream(side):
    x.add_(1)
"""


def test_what_the_runners_program_starts_has_it(tmp_path):
    """Also in a dry run. The program itself: test_readme."""
    child = tmp_path / "child.py"
    child.write_text(SCRIPT)
    starts = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(child)!r}]))"
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUALGPU", "HELPERS_GPUS", "RANK")}
    done = forks.run("-m", "virtualgpu", "--quiet", "--sanitize", "--dry", "-c", starts, env=environ)
    assert done.returncode == 1
    assert "virtualgpu.sanitizer.UnsynchronizedAccessError: a race: aten::add_.Tensor on stream 3" in done.stderr


def test_activate_leaves_it_as_it_is_unless_told():
    virtualgpu.gpus(1)
    cards = virtualgpu.machine().specs
    with virtualgpu.sanitize():
        session.activate(cards)
        assert session.looks_for_races()
        session.activate(cards, sanitize=False)
        assert not session.looks_for_races()
    assert not session.looks_for_races()


def test_pytorchs_own_detector_is_refused():
    """It would be told nothing, and find nothing."""
    done = forks.run("-c", "import torch.cuda._sanitizer, virtualgpu; virtualgpu.gpus(2)")
    assert done.returncode == 1 and "run the program by python -m virtualgpu --sanitize" in done.stderr
