"""What is disturbed: its command, what it prints where nothing disturbs it, what lies there before and must not be lost, and misuses."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.faults.disturb import FILL, KILL, STARVE, STOP
from tests.faults.place import ROOT

PYTHON = [sys.executable]
RUNNER = [sys.executable, "-m", "virtualgpu"]
PROGRAMS = ROOT / "tests" / "faults" / "programs"
ALL = (KILL, KILL, STOP, FILL, FILL, STARVE)


class Misuse(NamedTuple):
    """A command line or a surrounding that is wrong, and a pattern of the words that it is owed; is_right: it works all the same."""

    command: list[str]
    owes: str
    before: Callable[[Path], None] = lambda work: None
    environ: tuple[tuple[str, str], ...] = ()
    is_right: bool = False


class Subject(NamedTuple):
    """says: lines of the result. lost: what is wrong with what was there before, given the folder. is_ours: a traceback through `entries`, the files
    where a command of ours begins, is a fault. may_be_0: where something failed, the status may be 0 if that is said. least: seconds, a time limit of
    its own that may have to come first."""

    name: str
    command: list[str]
    says: tuple[str, ...]
    misuses: dict[str, Misuse]
    before: Callable[[Path], None] = lambda work: None
    lost: Callable[[Path], list[str]] = lambda work: []
    is_ours: bool = False
    entries: tuple[str, ...] = (str(ROOT / "virtualgpu" / "__main__.py"),)
    may_be_0: bool = False
    least: float = 30.0
    kinds: tuple[str, ...] = ALL


def _program(name: str) -> str:
    return str(PROGRAMS / f"{name}.py")


def _saved(work: Path) -> None:
    import torch

    from helpers import checkpoint

    checkpoint.save({"weight": torch.full((500_000,), -1.0), "step": -1}, work / "model.pt")


def _lost(work: Path) -> list[str]:
    """The checkpoint is there and whole, and beside it is nothing that a next save would not take away."""
    from helpers import checkpoint

    try:
        state = checkpoint.load(work / "model.pt")
    except Exception as error:
        return [f"the earlier checkpoint is lost: {error}"]
    return [] if (state["weight"] == state["step"]).all() else ["the checkpoint is a mixture"]


def _cut(work: Path) -> None:
    _saved(work)
    whole = (work / "model.pt").read_bytes()
    (work / "cut.pt").write_bytes(whole[: len(whole) // 3])


CHECKPOINT = Subject(
    "checkpoint",
    [*PYTHON, _program("saves"), "model.pt"],
    ("saved 59",),
    {},
    _saved,
    _lost,
)
LAUNCH = Subject("launch", [*PYTHON, _program("ranks")], ("[1000.0, 1000.0]", "done"), {}, least=60.0)
RUN = Subject(
    "runner",
    [*RUNNER, "--gpus", "2", "--trace", "trace.json", _program("program")],
    ("10.0 4000",),
    {},
    is_ours=True,
)
FIT = Subject(
    "fit",
    [*RUNNER, "fit", "--like", "T4,L4", "--vary", "batch-size=8,16", "--jobs", "2", "--limit", "60", _program("train")],
    ("T4     1          16  fits",),
    {},
    is_ours=True,
    may_be_0=True,
    least=150.0,
)
SUBJECTS = {subject.name: subject for subject in (CHECKPOINT, LAUNCH, RUN, FIT)}
