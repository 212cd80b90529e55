"""`python -m tests.bench`: the figures of the series, each measured side by side in one run, as a table and as build/bench.json.

A module bench_*.py beside this one has rows() -> list[Row]. Nothing here is a test: a slow or busy machine may miss a target.
"""

import importlib
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tests.bench.tools import BUILD, Row

HERE = Path(__file__).parent


def notebooks() -> list[Row]:
    """Seconds of each notebook, as the last `make run` on this machine noted them: running them again would take minutes."""
    times = BUILD / "times.json"
    if not times.exists():
        print("no build/times.json: `make run` writes it, and the notebooks' times appear here")
        return []
    found = json.loads(times.read_text())
    rows = [Row(f"notebook {name}", seconds, "s", "< 120 s", seconds < 120) for name, seconds in found.items()]
    half = sum(found.values()) / 2
    return [*rows, Row(f"{len(found)} notebooks, two at a time", half, "s", "< 300 s", half < 300)]


def main() -> None:
    start = time.perf_counter()
    rows = []
    # ranks first: their first launch must be the first
    for path in sorted(HERE.glob("bench_*.py"), key=lambda path: path.stem != "bench_ranks"):
        rows += importlib.import_module(f"tests.bench.{path.stem}").rows()
    rows += notebooks()
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(
            f"{row.what:<{width}}  {row.figure:>10.4g} {row.unit:<6} {row.target:<12} {'met' if row.met else 'MISSED'}"
        )
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{time.perf_counter() - start:.0f} s; also in build/bench.json")
    BUILD.mkdir(exist_ok=True)
    (BUILD / "bench.json").write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
