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
    from tests.faults.programs import notebook

    notebook.write(work)


def _notebook_lost(work: Path) -> list[str]:
    """Every file of it can be read, and the notebook has its cells."""
    import nbformat

    from tests.faults.programs.notebook import CELLS

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
    return [] if {"model", "optimizer", "epoch", "generators"} == state.keys() else ["not a whole state"]


def misuse(command: list[str], words: str, owes: str = "", before=lambda work: None, **environ: str) -> Misuse:
    """That command with these words behind it, programs by their names below. What is owed no words is to work all the same."""
    return Misuse(
        [*command, *(NAMED.get(word, word) for word in words.split())],
        owes,
        before,
        tuple(environ.items()),
        is_right=not owes,
    )


RANKS, PROGRAM, TRAIN, SEARCH = (_program(name) for name in ("ranks", "program", "train", "search"))
NAMED = {"PROGRAM": PROGRAM, "TRAIN": TRAIN, "TRAIN_DDP": TRAIN_DDP, "LOADS": _program("loads")}
NO_FILE, NO_PROGRAM = "none.py", "No such file|can't open file"
TWO = [*RUNNER, *TORCH, "--nproc-per-node=2"]
FITS, EXPLAINS = [*RUNNER, "fit"], [*RUNNER, "--explain", "--gpus=1"]

LAUNCH = Subject("launch", [*PYTHON, RANKS], ("[1000.0, 1000.0]", "done"), {
    "more than cores": misuse([*PYTHON, RANKS], "5"),
    "no rank": misuse([*PYTHON, RANKS], "0", "nprocs=0: ask for"),
    "MASTER_PORT of others": misuse([*PYTHON, RANKS], "", MASTER_PORT="1"),
    "no such interface": misuse([*PYTHON, RANKS], "", "no network interface", GLOO_SOCKET_IFNAME="eth9"),
    "TMPDIR is not there": misuse([*PYTHON, RANKS], "", TMPDIR="/nowhere"),
}, least=60.0)  # fmt: skip
RUN = Subject("runner", [*RUNNER, "--gpus", "2", "--trace", "trace.json", PROGRAM], ("10.0 4000",), {
    "no such file": misuse(RUNNER, NO_FILE, NO_PROGRAM),
    "no such card": misuse(RUNNER, "--like T5 PROGRAM", "T5"),
    "no such option": misuse(RUNNER, "--gpu 2 PROGRAM", "--gpu"),
    "options behind": misuse(RUNNER, "PROGRAM --gpus 2"),
    "no program": misuse(RUNNER, "--gpus 2", "name a program"),
    "no memory": Misuse([*RUNNER, "--memory", "1 KB", PROGRAM], "memory"),
    "trace into a folder": misuse(RUNNER, "--trace . PROGRAM", "--trace.*name a file in a folder"),
    "TMPDIR is not there": misuse(RUNNER, "PROGRAM", TMPDIR="/nowhere"),
    "half a GPU": misuse(RUNNER, "--gpus 0.5 PROGRAM", "0.5.*ask for 1 to"),
}, _trace, _trace_lost, is_ours=True, passes_on=True)  # fmt: skip
TORCHRUN = Subject("torchrun", [*RUNNER, "--gpus", "2", *TORCH, "--standalone", "--nproc-per-node=2", TRAIN_DDP, "--checkpoint", "model.pt"], ("epoch 2:",), {
    "more than GPUs": misuse([*RUNNER, *TORCH], "--standalone --nproc-per-node=3 TRAIN_DDP --checkpoint=a.pt", "device|GPU"),
    "more than cores": misuse([*RUNNER, "--gpus=4", *TORCH], "--standalone --nproc-per-node=4 TRAIN_DDP --checkpoint=a.pt"),
    "a truncated checkpoint": misuse(TWO, "--standalone TRAIN_DDP --checkpoint cut.pt", "truncated", _cut),
    "the port is taken": misuse(TWO, f"--master-port={PORT} TRAIN_DDP --checkpoint=a.pt", "in use|EADDRINUSE"),
    "no such file": misuse(TWO, f"--standalone {NO_FILE}", "No such file|can't open"),
}, lost=_epochs_lost, is_ours=True, passes_on=True, least=120.0)  # fmt: skip
FIT = Subject("fit", [*FITS, "--like", "T4,L4", "--vary", "batch-size=8,16", "--jobs", "2", "--limit", "60", TRAIN], ("T4     1          16  fits",), {
    "no such file": misuse(FITS, NO_FILE, NO_PROGRAM),
    "no such card": misuse(FITS, "--like T5 TRAIN", "T5"),
    "no such option": misuse(FITS, "--lik T4 TRAIN", "--lik"),
    "no values": misuse(FITS, "--vary batch-size TRAIN", "give an option"),
    "no table of prices": misuse(FITS, "--prices none.csv TRAIN", "none.csv"),
    "prices that are none": misuse(FITS, "--prices TRAIN TRAIN", "price|column"),
    "an option of none": misuse(FITS, "--vary batch-size=x TRAIN", "ValueError|invalid literal"),
    "a limit too short": misuse(FITS, "--limit 1 --steps 50 TRAIN", "had not ended after 1 s"),
}, is_ours=True, may_be_0=True, least=150.0)  # fmt: skip
EXPLAIN = Subject("explain", [*EXPLAINS, "--like", "V100", "--limit", "90", TRAIN], ("the step", "Also tried"), {
    "no such file": misuse(EXPLAINS, NO_FILE, NO_PROGRAM),
    "no such card": misuse([*RUNNER, "--explain"], "--like T5 TRAIN", "T5"),
    "one step": misuse(EXPLAINS, "--steps=1 TRAIN", "one step"),
    "no step": misuse(EXPLAINS, "LOADS none.pt", "No such file"),
    "a limit too short": misuse(EXPLAINS, "--limit=1 TRAIN", "not ended in time"),
}, is_ours=True, may_be_0=True, least=150.0)  # fmt: skip
TUNE = Subject("tune", [*PYTHON, SEARCH, "."], ("[3, 4, 5, 6]", "done"), {
    "read-only folder": misuse([*PYTHON, SEARCH], "closed", "[Rr]ead-only", _read_only),
    "TMPDIR is not there": misuse([*PYTHON, SEARCH], ".", TMPDIR="/nowhere"),
}, least=150.0)  # fmt: skip
NOTEBOOK = Subject("notebook", [*PYTHON, _program("notebook")], ("[ OK ] 01_short", "1 of 1 notebooks ran"), {
    "no such notebook": misuse([*PYTHON, _program("notebook")], "77", "No notebook's name begins with 77"),
    "no such option": misuse([*PYTHON, _program("notebook")], "--stores", "--stores"),
}, _notebook, _notebook_lost, is_ours=True, entries=(_program("notebook"), str(ROOT / "tools" / "run.py")), least=150.0)  # fmt: skip
SUBJECTS = {s.name: s for s in (LAUNCH, RUN, TORCHRUN, FIT, EXPLAIN, TUNE, NOTEBOOK)}
