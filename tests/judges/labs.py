"""Courses and tutorials of multi-GPU PyTorch, unmodified: what people learn it with, on virtual GPUs, beside the same on the CPU by gloo.

    python -m tests.judges labs FOLDER [name ...]      FOLDER: the checkouts, each a folder OWNER+REPOSITORY (README.md says how to get them)

labs.toml lists the programs: a repository, a command, what it needs of data, packages and weights (stand_ins/, made by us), and what is expected of it.
Each runs in a copy of its checkout, under `python -m virtualgpu`, and once more without it, where "GPUs" are the CPU and NCCL is gloo
(stand_ins/on_cpu.py). Compared are the loss of every backward pass of every rank, the digits that it prints, and the weights that it saves, as the list says.
A figure that its authors published for a named card stands beside the simulated one. Logs and labs.jsonl (a line a program) go to build/judges/labs/.
Exit status 0: all is as the list expects. A program whose checkout or package is missing is skipped, and named.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from tests.judges.examples import ALWAYS, wait_for
from tests.judges.report import BUILD, ROOT, runner, table
from tests.judges.stand_ins import data

HERE = Path(__file__).parent / "stand_ins"
OUT = BUILD / "labs"
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
DRY = {"VIRTUALGPU_CROSSCHECK": "1"}  # what a dry run remembers of one operation is compared with the next


@dataclass(frozen=True)
class Published:
    """A figure of the program's authors. simulated: a pattern of the output, whose last group times `scale` is ours in the same unit."""

    what: str
    value: float
    unit: str
    simulated: str
    where: str
    scale: float = 1.0


@dataclass(frozen=True)
class Program:
    """A line of labs.toml.

    run: its command, under the runner (dry: shapes alone; card, gpus, options: the runner's). inside: the folder it starts in.
    needs: data, as data.make takes it, and packages of ours, `package:NAME`, or a name
    that pip is to know of, `installed:NAME`. requires: packages that must be installed.
    path: folders of the checkout that Python imports from. reference: is there one?
    prints: a pattern; the numbers in its matches are compared, the lines in any order. losses: those of every backward pass are. weights: files that are.
    says: what its output must have. within: how far numbers may be apart, relative to the larger.
    expect: "same" (numbers as on the CPU), "ran", "refused" (a GPU would as well, or ours alone: `why`), "broken" (it fails on the CPU as well).
    """

    name: str
    run: str
    repository: str = ""
    commit: str = ""
    inside: str = "."
    gpus: int = 2
    card: str = "A100"
    dry: bool = False
    options: str = ""
    needs: list[str] = field(default_factory=list)
    requires: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    prints: str = ""
    losses: bool = True
    weights: list[str] = field(default_factory=list)
    says: str = ""
    within: float = 1e-5
    reference: bool = True
    expect: str = "same"
    why: str = ""
    limit: float = 240
    published: list[Published] = field(default_factory=list)


def programs() -> list[Program]:
    """Those of labs.toml."""
    found = []
    for repository in tomllib.loads((Path(__file__).parent / "labs.toml").read_text())["repository"]:
        common = {"repository": repository["name"], "commit": repository["commit"]}
        for entry in repository["program"]:
            figures = [Published(**figure) for figure in entry.pop("published", [])]
            found.append(Program(**common, **entry, published=figures))
    return found


def main(arguments: list[str]) -> int:
    listed = programs()
    parser = argparse.ArgumentParser(prog="python -m tests.judges labs")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(program.name for program in listed))
    parser.add_argument("--clone", action="store_true", help="first clone what FOLDER has not, at the commits judged")
    options = parser.parse_args(arguments)
    if options.clone:
        clone(listed, options.folder)
    if not options.names:
        shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    chosen = [
        program
        for program in listed
        if not options.names or any(program.name.startswith(name) for name in options.names)
    ]
    rows, wrong = [], []
    with open(OUT / "labs.jsonl", "a") as lines:
        for program in chosen:
            result = judge(program, options.folder.resolve())
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            as_expected = result["status"] in (program.expect, "skipped")
            wrong += [] if as_expected else [program.name]
            rows.append((program.name, result["status"], f"{result['seconds']:.0f} s", result["why"]))
            print(
                "  ".join([*rows[-1][:3], "" if as_expected else f"expected: {program.expect};", rows[-1][3]]),
                flush=True,
            )
            for figure in result["published"]:
                print(
                    "    {what}: published {value:g} {unit}, simulated {simulated:.4g}, ratio {ratio:.3f}".format(
                        **figure
                    )
                )
    print()
    table(rows)
    print()
    for status in ("same", "ran", "refused", "broken", "fails", "skipped"):
        count = sum(row[1] == status for row in rows)
        if count:
            print(f"{status}: {count}")
    if wrong:
        print(f"not as expected: {', '.join(wrong)}")
    return int(bool(wrong))


def clone(listed: list[Program], folder: Path) -> None:
    """The checkouts that `folder` lacks. Raises CalledProcessError where one cannot be had."""
    for repository, commit in dict.fromkeys((program.repository, program.commit) for program in listed):
        checkout = folder / repository.replace("/", "+")
        if not checkout.is_dir():
            subprocess.run(["git", "clone", "-q", f"https://github.com/{repository}", checkout], check=True)
            subprocess.run(["git", "-C", checkout, "checkout", "-q", commit], check=True)


def judge(program: Program, folder: Path) -> dict:
    """How a program did: its status ("same", "ran", "refused", "broken", "fails", "skipped"), why, what was compared, published and simulated."""
    result = {"name": program.name, "repository": program.repository, "commit": program.commit, "run": program.run}
    result |= {"status": "skipped", "why": "", "seconds": 0.0, "published": [], "apart": None}
    missing = [name for name in program.requires if importlib.util.find_spec(name) is None]
    checkout = folder / program.repository.replace("/", "+")
    if missing or not checkout.is_dir():
        return result | {"why": f"it needs {', '.join(missing)}" if missing else f"no checkout {checkout.name}"}
    with tempfile.TemporaryDirectory(prefix="labs") as scratch:
        ours = execute(program, checkout, Path(scratch, "ours"))
        compares = program.reference and not program.dry
        theirs = execute(program, checkout, Path(scratch, "theirs"), reference=True) if compares else None
        result |= {"seconds": round(ours.seconds, 1)} | _verdict(program, ours, theirs)
    result["published"] = [_beside(figure, ours.text) for figure in program.published]
    return result


@dataclass
class Ended:
    """A run: its exit status ("late": over its limit), what it wrote, where."""

    status: int | str
    text: str
    folder: Path
    seconds: float

    @property
    def well(self) -> bool:
        """Its status is 0, and no process that it started by hand ended with an error (its parent may not look)."""
        return self.status == 0 and not re.search(r"^Process \S*Process-\d+:$", self.text, re.M)

    def error(self) -> str:
        """The last error it tells."""
        pattern = r"^(?:\[rank\d+\]: ?|E? +|\S+: )?((?:[\w.]*(?:Error|Exception|Exit)\b: |FAILED |[\w.-]+: error: ).*)$"
        errors = [e for e in re.findall(pattern, self.text, re.M) if "ChildFailedError" not in e]
        return errors[-1][:240] if errors else "over its time" if self.status == "late" else f"ended with {self.status}"


def execute(program: Program, checkout: Path, folder: Path, reference: bool = False) -> Ended:
    """One run, in a copy of the checkout under `folder`, with its stand-ins."""
    work = (
        shutil.copytree(checkout, folder / "work", ignore=shutil.ignore_patterns(".git"), symlinks=True)
        / program.inside
    )
    packages, losses = folder / "packages", folder / "losses"
    packages.mkdir()
    losses.mkdir()
    for need in program.needs:
        kind, _, name = need.partition(":")
        if kind == "installed":
            metadata = packages / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        elif kind == "package":
            source = HERE / "packages" / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, packages / name)
        else:
            data.make(need, work)
    own = [folder / "work" / inside for inside in program.path]
    path = [packages, HERE, *own, os.environ.get("PYTHONPATH", ""), *([] if reference else [ROOT])]
    environment = {**os.environ, **ALWAYS, **OFFLINE, "PYTHONPATH": os.pathsep.join(map(str, filter(None, path)))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a `python` that has PyTorch
    environment |= {"HF_HOME": str(folder / "hf"), "WORK": str(work), **program.environment}
    environment |= {"LABS_LOSSES": str(losses)} if program.losses and program.reference and not program.dry else {}
    command = shlex.split(program.run)
    if reference:
        environment["LABS_REFERENCE"] = str(program.gpus)
        command = command if command[0] in ("torchrun", "bash", "accelerate") else [sys.executable, *command]
    else:
        environment |= DRY if program.dry else {}
        dry = ["--dry"] if program.dry else []
        options = ["--gpus", str(program.gpus), "--like", program.card, *dry, *shlex.split(program.options)]
        command = [*runner(*options), *command]
    log = OUT / f"{program.name}{'.reference' * reference}.log"
    start = time.monotonic()
    with open(log, "w") as out:
        process = subprocess.Popen(
            command,
            cwd=work,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    status = wait_for(process, "", log, program.limit)
    return Ended(status, log.read_text(errors="replace"), folder, time.monotonic() - start)


def _verdict(program: Program, ours: Ended, theirs: Ended | None) -> dict:
    said = re.search(program.says, ours.text, re.S) if program.says else True
    if not ours.well and theirs is not None and not theirs.well and program.expect == "broken":
        return {"status": "broken", "why": f"on the CPU as well: {theirs.error()}"}
    if program.expect == "refused" and not ours.well and said and program.says:
        return {"status": "refused", "why": ours.error()}
    if not ours.well:
        beside = "" if theirs is None else f"; on the CPU: {'ends well' if theirs.well else theirs.error()}"
        return {"status": "fails", "why": ours.error() + beside}
    if not said:
        return {"status": "fails", "why": f"its output has no {program.says!r}"}
    if theirs is None or not theirs.well:
        return {"status": "ran", "why": program.why or (f"on the CPU: {theirs.error()}" if theirs else "")}
    compared = _compared(program, ours, theirs)
    if isinstance(compared, str):
        return {"status": "fails", "why": compared}
    apart, what = compared
    if not what:
        return {"status": "ran", "why": program.why}
    words = "equal in every digit" if apart == 0 else f"within {apart:.1e}"
    good = apart <= program.within
    return {"status": "same" if good else "fails", "why": f"{', '.join(what)}: {words}", "apart": apart}


def _compared(program: Program, ours: Ended, theirs: Ended) -> tuple[float, list[str]] | str:
    """How far apart the farthest numbers are, and what was compared; a sentence where there is no like to compare with."""
    what, apart = [], 0.0
    sides = [_losses(side.folder / "losses") for side in (ours, theirs)]
    if program.losses and any(sides):
        if {rank: len(values) for rank, values in sides[0].items()} != {rank: len(v) for rank, v in sides[1].items()}:
            return f"losses: {_counts(sides[0])} here, {_counts(sides[1])} on the CPU"
        what.append(f"{sum(map(len, sides[0].values()))} losses")
        apart = max(
            [apart, *(_apart(a, b) for rank in sides[0] for a, b in zip(sides[0][rank], sides[1][rank], strict=True))]
        )
    if program.prints:
        lines = [sorted(found.group(0) for found in re.finditer(program.prints, side.text)) for side in (ours, theirs)]
        numbers = [[float(n) for line in each for n in NUMBER.findall(line)] for each in lines]
        if not numbers[0] or len(numbers[0]) != len(numbers[1]):
            return f"it prints {len(numbers[0])} numbers here, {len(numbers[1])} on the CPU"
        what.append(f"{len(numbers[0])} printed numbers")
        apart = max([apart, *map(_apart, *numbers)])
    for pattern in program.weights:
        files = [sorted((side.folder / "work" / program.inside).glob(pattern)) for side in (ours, theirs)]
        if not files[0] or len(files[0]) != len(files[1]):
            return f"{pattern}: {len(files[0])} files here, {len(files[1])} on the CPU"
        what.append(f"weights in {pattern}")
        apart = max([apart, *(_apart_files(*pair) for pair in zip(*files, strict=True))])
    return apart, what


def _losses(folder: Path) -> dict[int, list[float]]:
    """Of each rank, in order; a rank that several processes played, one after the other, in the order in which they ended."""
    found: dict[int, list[float]] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime):
        for line in file.read_text().splitlines():
            rank, loss = line.split()
            found.setdefault(int(rank), []).append(float(loss))
    return found


def _counts(losses: dict[int, list[float]]) -> str:
    return ", ".join(f"{len(losses[rank])} of rank {rank}" for rank in sorted(losses)) or "none"


def _apart(a: float, b: float) -> float:
    return (
        0.0
        if a == b or (a != a and b != b)
        else abs(a - b) / max(abs(a), abs(b))
        if abs(a - b) < float("inf")
        else float("inf")
    )


def _apart_files(ours: Path, theirs: Path) -> float:
    """Of tensors that both files have, the farthest numbers, relative to the largest number of its tensor."""
    import torch

    sides = [dict(_tensors(torch.load(file, map_location="cpu", weights_only=False))) for file in (ours, theirs)]
    if sides[0].keys() != sides[1].keys():
        return float("inf")
    apart = [0.0]
    for name, tensor in sides[0].items():
        a, b = tensor.detach().double(), sides[1][name].detach().double()
        apart.append(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0)
    return max(apart)


def _tensors(value, name=""):
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _tensors(each, f"{name}.{at}")


def _beside(figure: Published, text: str) -> dict:
    """The published figure and the last that the output has; nan where it has none."""
    found = re.findall(figure.simulated, text)
    simulated = float(found[-1]) * figure.scale if found else float("nan")
    words = {"what": figure.what, "value": figure.value, "unit": figure.unit, "where": figure.where}
    return words | {"simulated": simulated, "ratio": simulated / figure.value}
