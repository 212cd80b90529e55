"""`python -m tests.faults [--seed N] [--minutes M] [--only SUBJECT,...]`: programs of the project are killed, stopped, starved and misused at
random moments, and their disks filled.

An attempt is drawn from its seed alone: of the seeds N, N + 1, ... each is one. A line of the output repeats by its own seed,
--minutes 0, and --only with its subject. After each: nothing lost, nothing left, words on the cause, and an end in time (judge.py).
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.faults import disturb, judge, place
from tests.faults.subjects import SUBJECTS, Subject

MISUSE = "misuse"
lengths: dict[str, float] = {}  # seconds that each subject takes where nothing disturbs it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="after which no attempt begins any more (10); 0: one attempt"
    )
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--kind", help="one kind of fault: kill, stop, fill, starve, misuse")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - SUBJECTS.keys():
        parser.error(f"no subject is called {', '.join(sorted(unknown))}; there are: {', '.join(SUBJECTS)}")
    place.enter_namespace()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    folder = place.ROOT / "build" / "faults" / str(os.getpid())
    table, until = {}, time.monotonic() + 60 * options.minutes
    try:
        seed = options.seed
        while not table or time.monotonic() < until:
            dice = random.Random(seed)
            subject = SUBJECTS[chosen[0] if len(chosen) == 1 else dice.choice(chosen)]
            attempt(random.Random(f"{seed} {subject.name}"), seed, subject, folder, options.kind, table)
            seed += 1
    except KeyboardInterrupt:
        print("Interrupted: no process and no folder is left.")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        tell(table)
    return int(any(bad for _, bad in table.values()))


def attempt(dice: random.Random, seed: int, subject: Subject, folder: Path, only: str | None, table: dict) -> None:
    if subject.name not in lengths:
        start = time.monotonic()
        fault = disturb.Fault("undisturbed", "none", is_right=True)
        note(table, seed, subject, fault, "", *tried(subject, fault, folder / "0", 600, None))
        lengths[subject.name] = time.monotonic() - start
    length = lengths[subject.name]
    if only == MISUSE or (only is None and subject.misuses and dice.random() < 0.15):
        name = dice.choice(sorted(subject.misuses))
        misuse = subject.misuses[name]
        subject = subject._replace(command=misuse.command)
        fault = disturb.Fault(name, MISUSE, misuse.owes, is_right=misuse.is_right)
        note(
            table,
            seed,
            subject,
            fault,
            "",
            *tried(subject, fault, folder / "0", 5 * length + subject.least, None, misuse),
        )
        return
    kinds = (only,) if only else subject.kinds
    fault = disturb.draw(dice, kinds, os.geteuid() == 0, bool(os.environ.get(place.IN_NAMESPACE)))
    is_early = dice.random() < 0.15  # at its very beginning, or at some moment
    moment = dice.random() ** 2 * 1.5 if is_early else dice.random() * length
    start = time.monotonic()
    outcome = tried(subject, fault, folder / "0", 5 * length + subject.least, moment)
    if outcome[1] == "right":  # the machine has less to do than it had, or knows the files by now
        lengths[subject.name] = min(length, time.monotonic() - start)
    note(table, seed, subject, fault, f"{moment:.2f} of {length:.0f} s", *outcome)


def tried(
    subject: Subject, fault: disturb.Fault, folder: Path, limit: float, moment: float | None, misuse=None
) -> tuple[str, str, list[str]]:
    """What was struck, how it ended, and what is wrong with that."""
    with contextlib.ExitStack() as stack:
        at = place.Place(folder)
        stack.callback(at.end)
        subject.before(at.work)
        if misuse:
            misuse.before(at.work)
        at.start(subject.command, dict(misuse.environ) if misuse else {}, fault.prepare, fault.before)
        struck = ""
        if moment is not None and (fault.disk or fault.number):
            with contextlib.suppress(judge.TIMEOUT):
                at.process.wait(moment)
            struck = fault.strike(at) if at.process.poll() is None else "after its end"
        status = None
        with contextlib.suppress(judge.TIMEOUT):
            status = at.process.wait(limit)
        end, wrong = judge.faults(subject, fault, at, struck, status)
        if wrong:
            keep(at, subject)
        return struck, end, wrong


def keep(at: place.Place, subject: Subject) -> None:
    """What a program with a fault said, whole: build/faults/last-SUBJECT.txt."""
    path = place.ROOT / "build" / "faults" / f"last-{subject.name}.txt"
    path.write_text("\n--- stderr\n".join(at.said()), encoding="utf-8")


def note(
    table: dict, seed: int, subject: Subject, fault: disturb.Fault, when: str, struck: str, end: str, wrong: list[str]
) -> None:
    tried, bad = table.get((subject.name, fault.kind), (0, 0))
    table[subject.name, fault.kind] = tried + 1, bad + bool(wrong)
    whom = f" -> {struck}" if struck else ""
    print(
        f"{seed}  {subject.name:<10}  {fault.name}{whom}  [{when}]  {end}"
        + "".join(f"\n    FAULT: {one}" for one in wrong),
        flush=True,
    )


def tell(table: dict) -> None:
    kinds = sorted({kind for _, kind in table})
    rows = [["", *kinds]]
    for name in sorted({name for name, _ in table}):
        cells = [table.get((name, kind)) for kind in kinds]
        rows.append(
            [
                name,
                *("" if cell is None else f"{cell[0]}, {cell[1]} bad" if cell[1] else str(cell[0]) for cell in cells),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\nTried, and of these with a fault:")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
