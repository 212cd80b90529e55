"""What the judges share: where results go, tables, and the list of what need not pass."""

import fnmatch
import functools
import os
import shlex
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "judges"
ANEW = 99  # exit status of a process that cannot go on with the next test, where another one can


def runner(*options: str) -> list[str]:
    """`python -m virtualgpu` with these options, which is on before a program's first line; the variable RUNNER names another, or none."""
    default = [sys.executable, "-m", "virtualgpu", *options]
    return shlex.split(os.environ["RUNNER"]) if "RUNNER" in os.environ else default


def python_path() -> str:
    """With this project first."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@functools.cache
def _list() -> dict:
    return tomllib.loads((Path(__file__).parent / "need_not_pass.toml").read_text())


def excused(judge: str, name: str) -> str:
    """The reason why this one need not pass, from need_not_pass.toml; empty where there is none."""
    for group in _list().get(judge, []):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group["names"]):
            return group["reason"]
    return ""


def table(rows: list[tuple]) -> None:
    """Columns as wide as what is in them; the last one as it is."""
    if not rows:
        return
    widths = [max(len(str(row[at])) for row in rows) for at in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(f"{value!s:<{width}}" for value, width in zip(row, widths, strict=False)), str(row[-1])]))
