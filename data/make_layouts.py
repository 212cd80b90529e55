"""Writes layouts.csv: what each layout of notebook 12's runs takes, simulated. `python data/make_layouts.py [RUN ...]` (five minutes of a core each)

Rows of runs that are not named stay as they are.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from notebooks.scripts.plan_llama import RUNS, layouts, trial

FILE = Path(__file__).with_name("layouts.csv")
COLUMNS = ["run", "tp", "replicas", "checkpointing", "micro_batch", "seconds", "gib"]


def main(names):
    """names: of RUNS."""
    rows = list(csv.reader(FILE.open(encoding="utf-8")))[1:] if FILE.exists() else []
    for name in names:
        rows = [row for row in rows if row[0] != name]
        for layout in layouts(RUNS[name]):
            seconds, gib = trial(RUNS[name], layout)
            rows.append([name, *layout.values(), f"{seconds:.4g}", f"{gib:.4g}"])
        with FILE.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main(sys.argv[1:] or RUNS)
