"""What is disturbed: its command, what it prints where nothing disturbs it, what lies there before and must not be lost, and misuses."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.faults.disturb import FILL, KILL, STARVE, STOP
from tests.faults.place import IN_NAMESPACE, ROOT

PYTHON = [sys.executable]
RUNNER = [sys.executable, "-m", "virtualgpu"]
TORCH = ["-m", "torch.distributed.run"]
TRAIN_DDP = str(ROOT / "notebooks" / "scripts" / "train_ddp.py")
TAKEN = socket.create_server(("127.0.0.1", 0))  # until this script ends
PORT = TAKEN.getsockname()[1]
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
    where a command of ours begins, is a fault. may_be_0: where something failed, the status may be 0 if that is said. passes_on: it ends as its program does, by the same signal. least: seconds, a time limit of
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
    passes_on: bool = False
    least: float = 30.0
    kinds: tuple[str, ...] = ALL


def _program(name: str) -> str:
    return str(PROGRAMS / f"{name}.py")


def _cut(work: Path) -> None:
    """As after a download that broke off."""
    import torch

    torch.save({"weight": torch.zeros(500_000)}, work / "cut.pt")
    os.truncate(work / "cut.pt", 600_000)


def _notebook(work: Path) -> None:
    from tests.faults.programs import notebooks

    notebooks.write(work)


def _notebook_lost(work: Path) -> list[str]:
    """Every file of it can be read, and the notebook has its cells."""
    import nbformat

    from tests.faults.programs.notebooks import CELLS

    try:
        for path in work.rglob("*.json"):
            json.loads(path.read_text("utf-8"))
        for path in work.rglob("*.ipynb"):
            found = nbformat.read(path, 4)
            if [cell.source for cell in found.cells[1:]] != CELLS:
                return [f"{path.name} has other cells"]
    except Exception as error:
        return [f"{path.relative_to(work)} is lost: {type(error).__name__}: {error}"[:200]]
    return []


def _trace_lost(work: Path) -> list[str]:
    try:
        json.loads((work / "trace.json").read_text("utf-8"))
    except ValueError as error:
        return [f"the earlier trace is lost: {error}"]
    return []


def _trace(work: Path) -> None:
    (work / "trace.json").write_text("[]")


def _read_only(work: Path) -> None:
    """A folder that nobody may write into."""
    (work / "closed").mkdir()
    (work / "closed").chmod(0o555)  # which root does not heed
    if os.environ.get(IN_NAMESPACE):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(work / "closed")], check=True)


def _epochs_lost(work: Path) -> list[str]:
    """What rank 0 saved after an epoch is whole, where it came to that."""
    import torch

    try:
        state = torch.load(work / "model.pt", map_location="cpu")
    except FileNotFoundError:
        return []
    except Exception as error:
        return [f"the checkpoint is lost: {error}"]
    return [] if {"model", "optimizer", "epoch"} == state.keys() else ["not a whole state"]


LAUNCH = Subject(
    "launch",
    [*PYTHON, _program("ranks")],
    ("[1000.0, 1000.0]", "done"),
    {
        "more than cores": Misuse([*PYTHON, _program("ranks"), "5"], "", is_right=True),
        "no rank": Misuse([*PYTHON, _program("ranks"), "0"], "nprocs=0: ask for"),
        "MASTER_PORT of others": Misuse(
            [*PYTHON, _program("ranks")], "", environ=(("MASTER_PORT", "1"),), is_right=True
        ),
        "no such interface": Misuse(
            [*PYTHON, _program("ranks")], "no network interface", environ=(("GLOO_SOCKET_IFNAME", "eth9"),)
        ),
        "TMPDIR is not there": Misuse(
            [*PYTHON, _program("ranks")], "", environ=(("TMPDIR", "/nowhere"),), is_right=True
        ),
    },
    least=60.0,
)
RUN = Subject(
    "runner",
    [*RUNNER, "--gpus", "2", "--trace", "trace.json", _program("program")],
    ("10.0 4000",),
    {
        "no such file": Misuse([*RUNNER, "none.py"], "No such file|can't open file"),
        "no such card": Misuse([*RUNNER, "--like", "T5", _program("program")], "T5"),
        "no such option": Misuse([*RUNNER, "--gpu", "2", _program("program")], "--gpu"),
        "options behind": Misuse([*RUNNER, _program("program"), "--gpus", "2"], "", is_right=True),
        "no program": Misuse([*RUNNER, "--gpus", "2"], "name a program"),
        "no memory": Misuse([*RUNNER, "--memory", "1 KB", _program("program")], "memory"),
        "trace into a folder": Misuse(
            [*RUNNER, "--trace", ".", _program("program")], "--trace.*name a file in a folder"
        ),
        "TMPDIR is not there": Misuse(
            [*RUNNER, _program("program")], "", environ=(("TMPDIR", "/nowhere"),), is_right=True
        ),
        "half a GPU": Misuse([*RUNNER, "--gpus", "0.5", _program("program")], "0.5.*ask for 1 to"),
    },
    _trace,
    _trace_lost,
    is_ours=True,
    passes_on=True,
)
TORCHRUN = Subject(
    "torchrun",
    [*RUNNER, "--gpus", "2", *TORCH, "--standalone", "--nproc-per-node=2", TRAIN_DDP, "--checkpoint", "model.pt"],
    ("epoch 2:",),
    {
        "more than GPUs": Misuse(
            [*RUNNER, *TORCH, "--standalone", "--nproc-per-node=3", TRAIN_DDP, "--checkpoint=a.pt"], "device|GPU"
        ),
        "more than cores": Misuse(
            [*RUNNER, "--gpus=4", *TORCH, "--standalone", "--nproc-per-node=4", TRAIN_DDP, "--checkpoint=a.pt"],
            "",
            is_right=True,
        ),
        "a truncated checkpoint": Misuse(
            [*RUNNER, *TORCH, "--standalone", "--nproc-per-node=2", TRAIN_DDP, "--checkpoint", "cut.pt"],
            "truncated",
            _cut,
        ),
        "the port is taken": Misuse(
            [*RUNNER, *TORCH, "--nproc-per-node=2", f"--master-port={PORT}", TRAIN_DDP, "--checkpoint=a.pt"],
            "in use|EADDRINUSE",
        ),
        "no such file": Misuse(
            [*RUNNER, *TORCH, "--standalone", "--nproc-per-node=2", "none.py"], "No such file|can't open"
        ),
    },
    lost=_epochs_lost,
    is_ours=True,
    passes_on=True,
    least=120.0,
)
FIT = Subject(
    "fit",
    [*RUNNER, "fit", "--like", "T4,L4", "--vary", "batch-size=8,16", "--jobs", "2", "--limit", "60", _program("train")],
    ("T4     1          16  fits",),
    {
        "no such file": Misuse([*RUNNER, "fit", "none.py"], "No such file|can't open file"),
        "no such card": Misuse([*RUNNER, "fit", "--like", "T5", _program("train")], "T5"),
        "no such option": Misuse([*RUNNER, "fit", "--lik", "T4", _program("train")], "--lik"),
        "no values": Misuse([*RUNNER, "fit", "--vary", "batch-size", _program("train")], "give an option"),
        "no table of prices": Misuse([*RUNNER, "fit", "--prices", "none.csv", _program("train")], "none.csv"),
        "prices that are none": Misuse(
            [*RUNNER, "fit", "--prices", _program("train"), _program("train")], "price|column"
        ),
        "an option of none": Misuse(
            [*RUNNER, "fit", "--vary", "batch-size=x", _program("train")], "ValueError|invalid literal"
        ),
        "a limit too short": Misuse([*RUNNER, "fit", "--limit", "1", _program("train")], "had not ended after 1 s"),
    },
    is_ours=True,
    may_be_0=True,
    least=150.0,
)
EXPLAIN = Subject(
    "explain",
    [*RUNNER, "--explain", "--gpus", "1", "--like", "V100", "--limit", "90", _program("train")],
    ("the step", "Also tried"),
    {
        "no such file": Misuse([*RUNNER, "--explain", "--gpus=1", "none.py"], "No such file|can't open file"),
        "no such card": Misuse([*RUNNER, "--explain", "--like", "T5", _program("train")], "T5"),
        "one step": Misuse([*RUNNER, "--explain", "--gpus=1", "--steps=1", _program("train")], "one step"),
        "no step": Misuse([*RUNNER, "--explain", "--gpus=1", _program("loads"), "none.pt"], "No such file"),
        "a limit too short": Misuse(
            [*RUNNER, "--explain", "--gpus=1", "--limit=1", _program("train")], "not ended in time"
        ),
    },
    is_ours=True,
    may_be_0=True,
    least=150.0,
)
TUNE = Subject(
    "tune",
    [*PYTHON, _program("search"), "."],
    ("[3, 4, 5, 6]", "done"),
    {
        "read-only folder": Misuse([*PYTHON, _program("search"), "closed"], "[Rr]ead-only", _read_only),
        "TMPDIR is not there": Misuse(
            [*PYTHON, _program("search"), "."], "", environ=(("TMPDIR", "/nowhere"),), is_right=True
        ),
    },
    least=150.0,
)
NOTEBOOK = Subject(
    "notebook",
    [*PYTHON, _program("notebooks")],
    ("[ OK ] 01_short", "1 of 1 notebooks ran"),
    {
        "no such notebook": Misuse([*PYTHON, _program("notebooks"), "77"], "No notebook's name begins with 77"),
        "no such option": Misuse([*PYTHON, _program("notebooks"), "--stores"], "--stores"),
    },
    _notebook,
    _notebook_lost,
    is_ours=True,
    entries=(_program("notebooks"), str(ROOT / "tools" / "run.py")),
    least=150.0,
)
SUBJECTS = {s.name: s for s in (LAUNCH, RUN, TORCHRUN, FIT, EXPLAIN, TUNE, NOTEBOOK)}
