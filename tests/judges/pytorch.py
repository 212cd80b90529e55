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
from pathlib import Path

from tests.judges.report import BUILD, ROOT, excused, table

FILES = ["test_cuda_multigpu.py", "distributed/test_data_parallel.py", "test_cuda.py"]
CRASHES = 40  # after so many dead processes a file is given up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges pytorch")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--only", help="as pytest's -k")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    rows, failing = [], 0
    for file in options.files:
        results = run(options.folder.resolve() / file, options.only)
        passed, judged, excuses = judged_of(file, results)
        rows.append((file, f"{passed} of {judged}", _said(results, excuses)))
        failing += judged - passed
        for row in results:
            if row["outcome"] not in ("passed", "skipped"):
                print(f"{row['outcome']:8} {row['id']:100} {excuses.get(row['id']) or _first_line(row)}")
        listed = [row["id"] for row in results if row["outcome"] == "passed" and excused("pytorch", row["id"])]
        for name in listed:
            print(f"passed   {name:100} though need_not_pass.toml lists it")
    print()
    table(rows)
    return int(failing > 0)


def judged_of(file: str, results: list[dict]) -> tuple[int, int, dict[str, str]]:
    """Tests that pass, tests that should, and the reason for each that fails and need not pass. Skipped ones are in neither count."""
    failed = [row["id"] for row in results if row["outcome"] in ("failed", "crashed")]
    excuses = {name: reason for name in failed if (reason := excused("pytorch", name))}
    passed = sum(row["outcome"] == "passed" for row in results)
    return passed, passed + len(failed) - len(excuses), excuses


def run(path: Path, only: str | None = None) -> list[dict]:
    """One row a test of this file: id, outcome, why, seconds."""
    out = BUILD / f"{path.stem}.jsonl"
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
    )
    program = [
        *_runner(),
        "-m",
        "pytest",
        path.name,
        "--noconftest",
        "-p",
        "tests.judges.plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
    ]
    program += ["-W", "ignore", "--rootdir", str(path.parent), "-o", "addopts=", *(["-k", only] if only else [])]
    for _ in range(CRASHES):
        with open(out.with_suffix(".log"), "a") as log:
            code = subprocess.call(program, cwd=path.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if code in range(6):  # pytest's own
            break
        row = {
            "id": now.read_text() if now.exists() else path.name,
            "outcome": "crashed",
            "why": f"process ended with {code}",
            "seconds": 0,
        }
        with open(out, "a") as lines:
            lines.write(json.dumps(row) + "\n")
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _runner() -> list[str]:
    """`python -m virtualgpu --gpus 2`, which is on before the first line; RUNNER says another, "" none (the plugin makes the GPUs then)."""
    default = f"{sys.executable} -m virtualgpu --gpus 2 --like T4 --quiet"
    return os.environ.get("RUNNER", default).split() or [sys.executable]


def _said(results: list[dict], excuses: dict[str, str]) -> str:
    count = Counter(row["outcome"] for row in results)
    reasons = Counter(excuses.values())
    text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
    return text + "".join(f"; {number} need not: {reason}" for reason, number in reasons.most_common())


def _first_line(row: dict) -> str:
    return row["why"].split("\n")[0][:160]
