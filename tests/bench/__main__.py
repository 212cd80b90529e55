"""`python -m tests.bench`: the figures of the series, each measured side by side in one run, as a table and as build/bench.json.

Nothing here is a test: a slow or busy machine may miss a target.
"""

import json
import os
import platform
import time
from dataclasses import asdict

import torch

from tests.bench import monitor, ranks, virtual
from tests.bench.tools import BUILD, Row, below


def notebooks() -> list[Row]:
    """Seconds of each notebook, as the last `make run` on this machine noted them: running them again would take minutes."""
    times = BUILD / "times.json"
    if not times.exists():
        print("no build/times.json: `make run` writes it, and the notebooks' times appear here")
        return []
    found = json.loads(times.read_text())
    rows = [below(f"notebook {name}", seconds, "s", 120) for name, seconds in found.items()]
    return [*rows, below(f"{len(found)} notebooks, two at a time", sum(found.values()) / 2, "s", 300)]


def main() -> None:
    start = time.perf_counter()
    # ranks first: their first launch must be the first
    rows = [*ranks.rows(), *virtual.rows(), *monitor.rows(), *notebooks()]
    width = max(len(row.what) for row in rows)
    for row in rows:
        met = "met" if row.met else "MISSED"
        print(f"{row.what:<{width}}  {row.figure:>10.4g} {row.unit:<6} {row.target:<12} {met if row.target else ''}")
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    machine["torch"] = torch.__version__
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{time.perf_counter() - start:.0f} s; also in build/bench.json")
    BUILD.mkdir(exist_ok=True)
    (BUILD / "bench.json").write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
