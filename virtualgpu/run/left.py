"""What the processes of a program leave in the run's folder for the runner: a file of JSON each."""

import json
import os
from typing import Any


def path(folder: str, kind: str) -> str:
    """Where this process leaves what is of that kind."""
    return os.path.join(folder, f"{os.getpid()}.{kind}")


def leave(folder: str, kind: str, record: object) -> None:
    """For `collect`. Raises OSError."""
    with open(path(folder, kind), "w", encoding="utf-8") as file:
        json.dump(record, file)


def lost(folder: str, status: int | None, output: str) -> str:
    """A sentence where nothing can be left there, with the cure; "" where it can, and of a program that failed and said why. Where the disk is
    full, Python ends with 120, and not a word is kept."""
    if status and output:
        return ""
    try:
        leave(folder, "tried", " " * 4096)
    except OSError as error:
        return f"its figures could not be written: {error.strerror} in {folder}: free some space, or set TMPDIR to another folder"
    return ""


def collect(folder: str, kind: str) -> list[tuple[int, Any]]:
    """Each process's number and what it left; None for what was cut off: the process was killed, or the disk is full."""
    found: list[tuple[int, Any]] = []
    for name in os.listdir(folder):
        number, _, end = name.partition(".")
        if end == kind:
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    found.append((int(number), json.load(file)))
            except (OSError, ValueError):
                found.append((int(number), None))
    return sorted(found, key=lambda one: one[0])
