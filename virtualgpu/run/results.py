"""What the processes of a program leave in the run's folder for the runner: JSON files, and one Chrome trace out of theirs."""

import contextlib
import errno
import json
import os
from typing import Any

from virtualgpu.memory.ledger import Entry, by_rank

# -- What the processes of a program leave in the run's folder for the runner: a file of JSON each.


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
        begun = [name for name in os.listdir(folder) if name[:1].isdigit() and not os.path.getsize(f"{folder}/{name}")]
        why = os.strerror(errno.ENOSPC) if begun else ""  # it was full then, and is no more
    except OSError as error:
        why = error.strerror or str(error)
    return (
        why and f"its figures could not be written: {why} in {folder}: free some space, or set TMPDIR to another folder"
    )


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


# -- One Chrome trace out of those that a program's processes left: a row of GPUs for each process, by rank where it has one.
#
# The format is Google's "Trace Event Format" (JSON objects with name, ph, ts, dur in microseconds, pid, tid); Perfetto
# (ui.perfetto.dev) and chrome://tracing open it.


LEFT = "trace"
NOT_WRITTEN = "The trace was not written"


def merge(folder: str, entries: list[Entry], path: str) -> str:
    """Write the trace of all processes; returns the sentence that says so, and what is missing from it."""
    events: list[dict] = []
    written, missing, rows = 0, [], 0
    traces = dict(collect(folder, LEFT))
    for number, entry in by_rank(entries):
        name = f"rank {entry.rank}" if entry.rank >= 0 else f"process {number}"
        if (trace := traces.get(entry.pid)) is None:  # killed, or ended by os._exit
            missing.append(name)
            continue
        renamed = _renamed(
            trace["traceEvents"] if isinstance(trace, dict) else trace, f"{name} (pid {entry.pid})", rows
        )
        rows = 1 + max((event["pid"] for event in renamed), default=rows - 1)
        events += renamed
        written += 1
    try:
        _write({"traceEvents": events, "displayTimeUnit": "ms"}, path)
    except OSError as error:
        return f"{NOT_WRITTEN}: {error}."
    lost = f" (ended without writing theirs: {', '.join(missing)})" if missing else ""
    return f"Trace of {written} process{'es' * (written != 1)} in {path}{lost}: ui.perfetto.dev opens it."


def _write(trace: dict, path: str) -> None:
    """Whole or not at all, behind a link too; an earlier one stays until then. A device or a pipe is written to."""
    path = os.path.realpath(path)
    in_place = os.path.exists(path) and not os.path.isfile(path)
    part = path if in_place else f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(trace, file)
        if not in_place:
            os.replace(part, path)
    finally:
        if not in_place:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _renamed(events: list[dict], name: str, first: int) -> list[dict]:
    """One process's events under pids of their own, from `first` on, with its name on each."""
    own_pids = sorted({event.get("pid", 0) for event in events}, key=str)
    pids = {pid: first + place for place, pid in enumerate(own_pids)}
    called = {event.get("pid", 0): event["args"]["name"] for event in events if event.get("name") == "process_name"}
    head = []
    for pid, new in pids.items():
        title = f"{name}: {called[pid]}" if pid in called else name
        head.append({"name": "process_name", "ph": "M", "pid": new, "args": {"name": title}})
        head.append({"name": "process_sort_index", "ph": "M", "pid": new, "args": {"sort_index": new}})
    rest = []
    for event in events:
        if event.get("name") not in ("process_name", "process_sort_index", "process_labels"):
            event = {**event, "pid": pids[event.get("pid", 0)]}
            if "id" in event:  # arrows between events are found by it
                event["id"] = f"{first}.{event['id']}"
            rest.append(event)
    return head + rest
