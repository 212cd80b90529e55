"""`make accuracy`: figures that others measured and published, beside the ones simulated here; as a table, a picture and a JSON file.

    python -m tests.accuracy                  every program, each in a process of its own
    python -m tests.accuracy zero_recipe ...  these; the others' rows are those of the last time
    --write                                   the table into virtualgpu/docs/accuracy.md and README.md, the picture into docs/, and data/published.json

A program is a function of a module beside this one that returns rows; sources.toml says which, of what, and with which settings.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.accuracy import kernels, picture, table
from tests.accuracy.published import PROGRAMS, Row

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build"
KEPT = ("source", "what", "kind", "unit", "published", "simulated", "gpus", "note", "missed", "url")
LIMIT = 900  # seconds a program may take


def rows_of(name: str) -> list[Row]:
    """What the program finds, in this process; its chatter is dropped."""
    about = PROGRAMS[name]
    program = getattr(importlib.import_module(f"tests.accuracy.{about['module']}"), name)
    with contextlib.redirect_stdout(io.StringIO()):
        found = program()
    for row in found:
        row.source, row.url, row.gpus = name, row.url or about["url"], max(row.gpus, about.get("gpus", 1))
    return found


def apart(name: str) -> list[Row]:
    """The same in a fresh process, so that its seconds and its memory are its own. Raises RuntimeError with its last lines."""
    command = [sys.executable, "-m", "tests.accuracy", "--rows", name]
    environ = {**os.environ, "HELPERS_GPUS": "virtual", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode}:\n" + "\n".join(ended.stderr.splitlines()[-5:]))
    return [Row(**row) for row in json.loads(ended.stdout.splitlines()[-1])]


def last() -> list[Row]:
    """The rows of the last time; none before the first."""
    kept = BUILD / "accuracy.json"
    return [Row(**row) for row in json.loads(kept.read_text())] if kept.exists() else []


def run(names: list[str], rows: list[Row]) -> list[Row]:
    """The rows of these programs, and of the others as they are in `rows`; kept after each, with a bar of what is done on stderr."""
    begin = time.perf_counter()
    for done, name in enumerate(names):
        print(f"\r[{'#' * done}{'.' * (len(names) - done)}] {name:<20}", end="", file=sys.stderr, flush=True)
        rows = [row for row in rows if row.source != name] + apart(name)
        rows = [row for source in PROGRAMS for row in rows if row.source == source]
        BUILD.mkdir(exist_ok=True)
        (BUILD / "accuracy.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\r[{'#' * len(names)}] {time.perf_counter() - begin:.0f} s{'':<20}", file=sys.stderr)
    return rows


def keep(rows: list[Row]) -> None:
    """For lessons 07 and 10, which show them: a row a line, with eight digits, so that sums in another order change nothing."""
    lines = [
        json.dumps({name: getattr(row, name) for name in KEPT} | {"simulated": float(f"{row.simulated:.8g}")})
        for row in rows
    ]
    (ROOT / "data" / "published.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--write", action="store_true", help="the tables and docs/accuracy.png as well")
    parser.add_argument("--rows", metavar="PROGRAM", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        print(json.dumps([asdict(row) for row in rows_of(options.rows)]))
        return 0
    if unknown := set(options.programs) - set(PROGRAMS):
        parser.error(f"no program named {', '.join(sorted(unknown))}: there are {', '.join(PROGRAMS)}")
    rows = last()
    missing = sorted(set(PROGRAMS) - set(options.programs) - {row.source for row in rows})
    if options.write and options.programs and missing:
        parser.error(f"--write needs the rows of all: there are none yet of {', '.join(missing)}")
    rows = run(options.programs or list(PROGRAMS), rows)
    print(table.plain(rows))
    print(f"\n{kernels.table()}\n")
    picture.draw(rows, BUILD / "accuracy.png")
    print("also in build/accuracy.json, and drawn in build/accuracy.png")
    if options.write:
        table.write(rows, ROOT)
        picture.draw(rows, ROOT / "docs" / "accuracy.png")
        keep(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
