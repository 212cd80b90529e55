"""Tests of PyTorch's own suite on two virtual GPUs.

    python -m tests.judges pytorch FOLDER [--only EXPRESSION] [file ...]      FOLDER: PyTorch's test/ (README.md says how to get it)

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

from tests.judges.report import ANEW, BUILD, ROOT, excused, runner, table

CRASHES = 40  # after so many dead processes a file is given up


@dataclass(frozen=True)
class How:
    """One judge by tests of PyTorch. judge: its name in need_not_pass.toml. pytest: the module that is run. limit: seconds a test may take.
    again: what fails runs once more, alone in a process.
    """

    judge: str
    files: list[str]
    gpus: int = 2
    pytest: str = "tests.judges.older_tests"
    limit: int = 60
    again: bool = True


ONE_PROCESS = How(
    "pytorch", ["test_cuda_multigpu.py", "distributed/test_data_parallel.py", "test_cuda.py", "test_autograd.py"]
)
ON_GPUS = {
    "test_autograd.py": "CUDA"
}  # of these files, where --only says nothing else: their other tests are the CPU's


def main(arguments: list[str], how: How = ONE_PROCESS) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m tests.judges {how.judge}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=how.files)
    parser.add_argument("--only", help="as pytest's -k")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    rows, failing = [], 0
    for file in options.files:
        results = run(options.folder.resolve() / file, how, options.only or ON_GPUS.get(file))
        passed, judged, excuses = judged_of(results, how.judge)
        rows.append((file, f"{passed} of {judged}", _said(results, excuses)))
        failing += judged - passed
        for row in results:
            if row["outcome"] not in ("passed", "skipped"):
                print(f"{row['outcome']:8} {row['id']:100} {excuses.get(row['id']) or _first_line(row)}")
        listed = [row["id"] for row in results if row["outcome"] == "passed" and excused(how.judge, row["id"])]
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


def run(path: Path, how: How, only: str | None = None) -> list[dict]:
    """One row a test of this file: id, outcome, why, seconds.

    What fails without an excuse runs once more, alone in a process, as PyTorch's own runner does it: memory that an earlier test left
    is no finding. `alone` says so of a row that then passes.
    """
    out = BUILD / f"{path.stem}.jsonl"
    rows = _run(path, how, out, ["-k", only] if only else [])
    for row in rows if how.again else []:
        if row["outcome"] == "failed" and not row["why"].startswith("Late") and not excused(how.judge, row["id"]):
            again = _run(path, how, out.with_suffix(".alone.jsonl"), [], row["id"])
            if [found["outcome"] for found in again] == ["passed"]:
                row.update(outcome="passed", why="", alone=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _run(path: Path, how: How, out: Path, options: list[str], test: str = "") -> list[dict]:
    """The rows of one test, or of all tests; after a crash it goes on with the rest."""
    now = out.with_suffix(".now")
    for left in (out, now, out.with_suffix(".log")):
        left.unlink(missing_ok=True)
    places = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = dict(
        os.environ,
        JUDGE_OUT=str(out),
        PYTHONPATH=os.pathsep.join(places),
        OMP_NUM_THREADS="1",
        PYTHONDONTWRITEBYTECODE="1",
        JUDGE_LIMIT=str(how.limit),
    )
    # PyTorch's own runner has no plugin for warnings: its tests see those that Python shows
    program = [*_runner(how.gpus), "-m", how.pytest, test or path.name, "--noconftest", "-p", "tests.judges.plugin"]
    program += ["-p", "no:cacheprovider", "-p", "no:warnings", "-q", "--tb=short", "--rootdir", str(path.parent)]
    program += ["-o", "addopts=", *options]
    for _ in range(CRASHES):
        with open(out.with_suffix(".log"), "a") as log:
            code = subprocess.call(program, cwd=path.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if code in range(6):  # pytest's own
            break
        if code == ANEW:
            continue
        row = {
            "id": now.read_text() if now.exists() else path.name,
            "outcome": "crashed",
            "why": f"process ended with {code}",
            "seconds": 0,
        }
        with open(out, "a") as lines:
            lines.write(json.dumps(row) + "\n")
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _runner(gpus: int) -> list[str]:
    """`python -m virtualgpu --gpus N`, which is on before the first line; RUNNER says another, "" none (the plugin makes the GPUs then)."""
    return runner("--gpus", str(gpus), "--like", "T4", "--quiet") or [sys.executable]


def _said(results: list[dict], excuses: dict[str, str]) -> str:
    count = Counter(row["outcome"] for row in results)
    reasons = Counter(excuses.values())
    text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
    alone = sum(row.get("alone", False) for row in results)
    text += f" ({alone} of them only alone)" if alone else ""
    return text + "".join(f"; {number} need not: {reason}" for reason, number in reasons.most_common())


def _first_line(row: dict) -> str:
    return row["why"].split("\n")[0][:160]
