"""Every operation of PyTorch's own database (op_db of torch.testing._internal.common_methods_invocations) on a virtual GPU.

    python -m tests.judges op_db [--dry] [--all] [--part K/N] [name ...]

--dry: in a dry run as well. --all: every sample of each operation, not one. --part 2/3: the second of three equal parts. A name stands
for all its variants; name.variant for one. Prints what is wrong and how often each cause; a JSON line an operation in build/judges/op_db.jsonl.
Exit status 0: nothing is wrong but what need_not_pass.toml lists. `one_operation` says what is judged. Needs PyPI's expecttest.

Operations are judged in processes of their own, one after the other: where one ends its process, it is noted as crashed, and the rest goes on.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tests.judges.report import BUILD, excused, table

CHUNK = 120  # operations a process judges
# Bytes are those of the operation: before PyTorch 2.15, each product would leave cuBLAS's workspace behind
WITHOUT_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
SLOW = 900  # seconds a process may take; one operation has its own limit, which a kernel in C++ may not heed


def main(arguments: list[str], judge: str = "op_db") -> int:
    options = _options(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    out = options.out
    out.unlink(missing_ok=True)
    names = _known(options)
    left = names
    while left:
        words = ["--worker", "--out", str(out), *_flags(options), *left[:CHUNK]]
        code = _process([sys.executable, "-m", "tests.judges.op_db", *words], out, SLOW * (10 if options.all else 1))
        done = {key(row) for row in read(out)}
        if code and left[0] not in done | {_now(out)}:
            print(f"op_db: a process ended with {code} before its first operation; see {out.with_suffix('.log')}")
            return 1
        if code and (name := _now(out)) not in done:
            name, variant = name.split("@")
            crash = {"outcome": "crashed", "why": [f"process ended with {code}"]}
            _note(out, {"name": name, "variant": variant, **crash})
            done.add(f"{name}@{variant}")
        left = [name for name in left if name not in done]
    return report(read(out))


def _process(command: list[str], out: Path, limit: int) -> int:
    """Its exit status, after so many seconds at most."""
    with open(out.with_suffix(".log"), "a") as log:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def report(rows: list[dict]) -> int:
    """The table, the causes, and the exit status."""
    count = Counter(row["outcome"] for row in rows)
    bad = [row for row in rows if row["outcome"] in ("wrong", "crashed")]
    reasons = {key(row): excused("op_db", key(row)) for row in bad}
    checks, causes = Counter(), defaultdict(list)
    for row in bad:
        checks.update({why.split(":")[0] for why in row["why"]})
        for cause in {cause_of(why) for why in row["why"]}:
            causes[cause].append(key(row))
    for row in bad:
        print(f"{row['outcome']:8} {key(row):50} {reasons[key(row)] or '; '.join(row['why'])[:200]}")
    print()
    by_number = sorted(causes.items(), key=lambda item: -len(item[1]))
    table([(f"{len(names)}", cause, ", ".join(names[:3])) for cause, names in by_number])
    judged, excused_ones = len(rows) - count["unjudged"], sum(map(bool, reasons.values()))
    print(f"\nop_db: {judged - len(bad)} of {judged} right ({dict(count)}); wrong by check: {dict(checks)};", end=" ")
    print(f"{excused_ones} of the wrong need not pass")
    return int(not all(reasons.values()))


def cause_of(why: str) -> str:
    """A finding without the numbers and quoted things in it, so that like findings count together."""
    return re.sub(r"'[^']*'", "'...'", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", why))[:150]


def key(row: dict) -> str:
    return f"{row['name']}@{row['variant']}"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _worker(options) -> int:
    """Judges the named operations, one JSON line each."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    from tests.judges.one_operation import judge
    from virtualgpu import _compat

    if _compat.KEEPS_WORKSPACES:
        os.environ.update(WITHOUT_WORKSPACES)
    torch.set_num_threads(1)
    by_key = {f"{op.name}@{op.variant_test_name}": op for op in op_db}
    for name in options.names:
        options.out.with_suffix(".now").write_text(name)
        _note(options.out, judge(by_key[name], options.all, options.dry).line())
    return 0


def _known(options) -> list[str]:
    """The keys of the operations that are asked for."""
    from torch.testing._internal.common_methods_invocations import op_db

    keys = [f"{op.name}@{op.variant_test_name}" for op in op_db]
    if options.names:
        asked = {name.replace("@", ".").removesuffix(".") for name in options.names}
        keys = [k for k in keys if k.split("@")[0] in asked or k.replace("@", ".").removesuffix(".") in asked]
    part, parts = options.part
    return keys[part - 1 :: parts]


def _now(out: Path) -> str:
    now = out.with_suffix(".now")
    return now.read_text() if now.exists() else ""


def _note(out: Path, row: dict) -> None:
    with open(out, "a") as lines:
        lines.write(json.dumps(row) + "\n")


def _flags(options) -> list[str]:
    return [f"--{name}" for name in ("dry", "all") if getattr(options, name)]


def _options(arguments: list[str]):
    parser = argparse.ArgumentParser(prog="python -m tests.judges op_db")
    parser.add_argument("--dry", action="store_true", help="in a dry run as well")
    parser.add_argument("--all", action="store_true", help="every sample, not one")
    parser.add_argument("--part", type=lambda text: tuple(map(int, text.split("/"))), default=(1, 1), help="K/N")
    parser.add_argument("--out", type=Path, default=BUILD / "op_db.jsonl")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(_worker(_options(sys.argv[1:])))
