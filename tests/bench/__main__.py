"""`make bench`: the figures of the series, each measured side by side in one run, as a table and as build/bench.json.

A module bench_*.py beside this one has rows() -> list[Row]. Nothing here is a test: a slow or busy machine may miss a target.
"""

import importlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch

HERE = Path(__file__).parent


def main() -> None:
    rows = []
    for path in sorted(HERE.glob("bench_*.py")):
        rows += importlib.import_module(f"tests.bench.{path.stem}").rows()
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
    build = HERE.parent.parent / "build"
    build.mkdir(exist_ok=True)
    (build / "bench.json").write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
