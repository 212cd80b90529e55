"""Faults put into the engine on purpose, one at a time: `python -m tests.mutants` shows which test notices each (tests/mutants.csv).

A test may go when every mutant that it kills still dies. Usage, from the root of a clone with nothing uncommitted under virtualgpu/:

    python -m tests.mutants                                 # all rows of the table: each must die by the test that is written there
    python -m tests.mutants --room memory                   # those of one folder
    python -m tests.mutants --draw 6 --room memory --seed 1 # six more: a sign, a constant, a comparison or a check, drawn by the seed, and
                                                            # the tests under tests/virtualgpu/memory that notice them are looked for

What no test of the room notices is printed, and not kept: such a change may be one that nobody can see.
"""

import argparse
import ast
import csv
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("mutants.csv")
COLUMNS = ["file", "before", "after", "killed_by"]
NO_END, LIMIT = "no end", 400  # seconds: a test that never ends has noticed, too

COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
            ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
CALCULATED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


def changes(source: str):
    """All (line number, line before, line after) that one change of the code makes within a line."""
    lines = source.splitlines()
    tree = ast.parse(source)
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
              for part in function.body for node in ast.walk(part)}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) not in inside:
            continue
        for part, text in _changed(node):
            if part.lineno == part.end_lineno:
                line = lines[part.lineno - 1].encode()
                after = (line[: part.col_offset] + text.encode() + line[part.end_col_offset :]).decode()
                yield part.lineno, lines[part.lineno - 1], after


def _changed(node):
    """(part, its new text): what may be changed of this node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, operator, right = ast.unparse(node.left), COMPARED[type(node.ops[0])], ast.unparse(node.comparators[0])
        yield node, f"{left} {operator} {right}"
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in CALCULATED
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
    ):
        yield node, f"({ast.unparse(node.left)} {CALCULATED[type(node.op)]} {ast.unparse(node.right)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, repr(node.value + 1 if isinstance(node.value, int) else node.value * 1.5)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, repr(not node.value)
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        yield (
            node,
            (" and " if isinstance(node.op, ast.Or) else " or ").join(
                f"({ast.unparse(value)})" for value in node.values
            ),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.If) and any(isinstance(statement, ast.Raise) for statement in node.body):
        yield node.test, "False"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield node.func, {"min": "max", "max": "min"}[node.func.id]


def files(room: str) -> list[Path]:
    folder = ROOT / "virtualgpu" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def tests_of(file: str) -> str:
    """Where the tests of a file of the engine are."""
    room = Path(file).parts[1]
    folder = ROOT / "tests/virtualgpu" / room
    return str(folder.relative_to(ROOT)) if folder.is_dir() else "tests/virtualgpu"


def killer(row: dict[str, str], where: list[str]) -> str | None:
    """The first test there that fails with the change made; None where all pass. The file is as it was afterwards."""
    path = ROOT / row["file"]
    source = path.read_text()
    if source.splitlines().count(row["before"]) != 1:
        return f"GONE from {row['file']}: give its row the new line, or draw another"
    try:
        path.write_text(source.replace(row["before"] + "\n", row["after"] + "\n"))
        command = f"{sys.executable} -m pytest -q -x --no-header -p no:cacheprovider -m".split()
        result = subprocess.run([*command, "not judge", *where], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                                capture_output=True, text=True, timeout=LIMIT, check=False)  # fmt: skip
        output = result.stdout + result.stderr
    except subprocess.TimeoutExpired:
        return NO_END
    finally:
        path.write_text(source)
    named = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)*)", output, re.MULTILINE)
    if result.returncode in (0, 5) or "ERROR: not found:" in output:
        return None
    return named[1] if named else where[0]  # the interpreter died, or nothing could be imported


def draw(room: str, number: int, seed: int, options: list[str]):
    """So many changes of this folder that a test of it notices; those of which it takes longer to know are left out."""
    possible = []
    for path in files(room):
        source = path.read_text()
        once = Counter(source.splitlines())
        possible += [(str(path.relative_to(ROOT)), before, after) for _, before, after in changes(source)
                     if once[before] == 1 and before != after]  # fmt: skip
    for file, before, after in random.Random(seed).sample(possible, len(possible)):
        row = {"file": file, "before": before, "after": after, "killed_by": ""}
        row["killed_by"] = killer(row, [tests_of(file), *options]) or ""
        print(f"{row['killed_by'] or 'SURVIVES'}: {file}: {before.strip()}  ->  {after.strip()}", flush=True)
        if row["killed_by"] and row["killed_by"] != NO_END:
            number -= 1
            yield row
        if not number:
            break


def write(rows: list[dict[str, str]]):
    with TABLE.open("w", newline="") as table:
        writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["file"], row["before"])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help="a folder or file of virtualgpu/ alone, such as memory")
    parser.add_argument("--draw", type=int, metavar="N", help="draw so many new ones, and add them to the table")
    parser.add_argument("--seed", type=int, default=74)
    parser.add_argument("pytest", nargs="*", help="options of pytest, such as -- -n 2")
    args = parser.parse_args()
    rows = list(csv.DictReader(TABLE.open())) if TABLE.exists() else []
    if args.draw:
        for row in draw(args.room, args.draw, args.seed, args.pytest):
            rows.append(row)
            write(rows)
    survivors = 0
    for row in rows if not args.draw else []:
        if args.room and not row["file"].startswith(f"virtualgpu/{args.room}"):
            continue
        known = (
            [row["killed_by"]] if "::" in row["killed_by"] and (ROOT / row["killed_by"].split("::")[0]).exists() else []
        )
        found = (known and killer(row, known)) or killer(row, [tests_of(row["file"]), *args.pytest])
        print(f"{found or 'SURVIVES'}: {row['file']}: {row['before'].strip()}  ->  {row['after'].strip()}", flush=True)
        gone = not found or found.startswith("GONE")
        survivors += gone
        row["killed_by"] = row["killed_by"] if gone else found
    write(rows)
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
