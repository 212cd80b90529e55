"""Tests of PyTorch's own suite on two virtual GPUs.

    python -m tests.judges pytorch FOLDER [--only EXPRESSION] [file ...]      FOLDER: PyTorch's test/ (README.md says how to get it)
    python -m tests.judges distributed FOLDER [...]                           tests of several processes: the collectives of nccl, FSDP2; on GPUS of
                                                                              them (variable; 2 unless it says 4, with which fewer skip)

Each file runs in a process of its own by pytest; `plugin` notes each test as a JSON line in build/judges/<file>.jsonl. Where a test ends
the process, that is noted as crashed, and the rest goes on. Prints passed / failed / skipped a file and the commonest reasons.
What need not pass, and why, is listed in need_not_pass.toml. Exit status 0: every other test passes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.judges.report import ANEW, BUILD, excused, python_path, runner, table

CRASHES = 40  # after so many dead processes a file is given up


FSDP2 = ("init", "state", "comm", "training", "memory", "overlap", "autograd", "clip_grad_norm_", "frozen")
FSDP2 += ("mixed_precision", "grad_scaler", "state_dict")


@dataclass(frozen=True)
class Judge:
    """Its files. limit: seconds a test may take. again: what fails runs once more, alone in a process."""

    files: tuple[str, ...]
    gpus: int
    limit: int
    again: bool


JUDGES = {
    "pytorch": Judge(
        ("test_cuda_multigpu.py", "distributed/test_data_parallel.py", "test_cuda.py", "test_autograd.py"), 2, 60, True
    ),
    "distributed": Judge(
        (
            "distributed/test_c10d_ops_nccl.py",
            *(f"distributed/_composable/fsdp/test_fully_shard_{name}.py" for name in FSDP2),
        ),
        int(os.environ.get("GPUS", "2")),
        300,
        False,
    ),
}
# of these files, where --only says nothing else: their other tests are the CPU's
ON_GPUS = {"test_autograd.py": "CUDA"}


def main(arguments: list[str], judge: str) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m tests.judges {judge}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=JUDGES[judge].files)
    parser.add_argument("--only", help="as pytest's -k")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    rows, failing = [], 0
    for file in options.files:
        results = run(options.folder.resolve() / file, judge, options.only or ON_GPUS.get(file))
        passed, judged, excuses = judged_of(results, judge)
        rows.append((file, f"{passed} of {judged}", _said(results, excuses)))
        failing += judged - passed
        for row in results:
            if row["outcome"] not in ("passed", "skipped"):
                print(f"{row['outcome']:8} {row['id']:100} {excuses.get(row['id']) or _first_line(row)}")
        listed = [row["id"] for row in results if row["outcome"] == "passed" and excused(judge, row["id"])]
        for name in listed:
            print(f"passed   {name:100} though need_not_pass.toml lists it")
    print()
    table(rows)
    return int(failing > 0)


def judged_of(results: list[dict], judge: str) -> tuple[int, int, dict[str, str]]:
    """Tests that pass, tests that should, and the reason for each that fails and need not pass. Skipped ones are in neither count."""
    failed = [row["id"] for row in results if row["outcome"] in ("failed", "crashed")]
    excuses = {name: reason for name in failed if (reason := excused(judge, name))}
    passed = sum(row["outcome"] == "passed" for row in results)
    return passed, passed + len(failed) - len(excuses), excuses


def run(path: Path, judge: str, only: str | None = None) -> list[dict]:
    """One row a test of this file: id, outcome, why, seconds.

    What fails without an excuse runs once more, alone in a process, as PyTorch's own runner does it: memory that an earlier test left
    is no finding. `alone` says so of a row that then passes.
    """
    out, how = BUILD / f"{path.stem}.jsonl", JUDGES[judge]
    rows = _run(path, how, out, ["-k", only] if only else [])
    for row in rows if how.again else []:
        if row["outcome"] == "failed" and not row["why"].startswith("Late") and not excused(judge, row["id"]):
            again = _run(path, how, out.with_suffix(".alone.jsonl"), [], row["id"])
            if [found["outcome"] for found in again] == ["passed"]:
                row.update(outcome="passed", why="", alone=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _run(path: Path, how: Judge, out: Path, options: list[str], test: str = "") -> list[dict]:
    """The rows of one test, or of all tests; after a crash it goes on with the rest."""
    now = out.with_suffix(".now")
    for left in (out, now, out.with_suffix(".log")):
        left.unlink(missing_ok=True)
    environment = os.environ | {"JUDGE_OUT": str(out), "JUDGE_LIMIT": str(how.limit), "PYTHONPATH": python_path()}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # the runner is on before the first line; where RUNNER says there is none, the plugin makes the GPUs
    program = runner("--gpus", str(how.gpus), "--like", "T4", "--quiet") or [sys.executable]
    # PyTorch's own runner has no plugin for warnings: its tests see those that Python shows
    program += f"-m tests.judges.older_tests {test or path.name} --noconftest -p tests.judges.plugin".split()
    program += ["-p", "no:cacheprovider", "-p", "no:warnings", "-q", "--tb=short", "-o", "addopts=", "--rootdir"]
    program += [str(path.parent), *options]
    for _ in range(CRASHES):
        with open(out.with_suffix(".log"), "a") as log:
            code = subprocess.call(program, cwd=path.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if code in range(6):  # pytest's own
            break
        if code == ANEW:
            continue
        name = now.read_text() if now.exists() else path.name
        row = {"id": name, "outcome": "crashed", "why": f"process ended with {code}", "seconds": 0}
        with open(out, "a") as lines:
            lines.write(json.dumps(row) + "\n")
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _said(results: list[dict], excuses: dict[str, str]) -> str:
    count = Counter(row["outcome"] for row in results)
    reasons = Counter(excuses.values())
    text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
    alone = sum(row.get("alone", False) for row in results)
    text += f" ({alone} of them only alone)" if alone else ""
    return text + "".join(f"; {number} need not: {reason}" for reason, number in reasons.most_common())


def _first_line(row: dict) -> str:
    return row["why"].split("\n")[0][:160]
