"""What a trial's program printed: the error that ended it, the lines that read a value, what the engine warned of."""

import os
import re
import signal
import sys
from collections.abc import Sequence

from virtualgpu.environment import DRY_HAS_NO_VALUES
from virtualgpu.run import program

READS = re.compile(rf"^(.+):(\d+): UserWarning: {DRY_HAS_NO_VALUES}", re.M)
WARNING = re.compile(r"UserWarning: (.*\bvirtual GPUs?\b.*)$", re.M)
ERROR = re.compile(r"([\w.]*(?:Error|Exception|Interrupt)\w*|[^\s:]+: error)(:.*)?$")  # or argparse's
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
RANK = re.compile(r"^\[[\w:]*rank\d+\]:\s?")
# Whoever waited for what had failed: torchrun for its processes, a rank for another one
CONSEQUENCES = re.compile(
    r"ChildFailedError|ProcessExitedException|ProcessRaisedException|DistBackendError|RendezvousConnectionError"
)
PACKAGE = os.path.dirname(program.HERE)


def reads(output: str) -> str:
    """The first line of the program that reads a value of the GPU, "train.py:12"; or nothing."""
    line = READS.search(output)
    return f"{os.path.basename(line[1])}:{line[2]}" if line else ""


def not_known(places: Sequence[str]) -> str:
    """A sentence on lines that read a value of the GPU."""
    decided = "so what the program decides by it may be otherwise"
    return f"{', '.join(places)} read{'s' * (len(places) == 1)} a value of the GPU: a dry run has nan there, {decided}."


def warnings(output: str) -> list[str]:
    """What the engine does otherwise than a GPU, as it said so, each once."""
    return list(dict.fromkeys(words.strip() for words in WARNING.findall(output)))


def end(status: int, output: str) -> str:
    """What a program that failed came to."""
    if -status in {number.value for number in signal.Signals}:
        killed = -status == getattr(signal, "SIGKILL", 9)
        cure = " (this machine's memory may have been too small: --jobs 1)" if killed else ""
        return f"ended by {signal.Signals(-status).name}{cure}"
    return error(output) or f"ended with status {status}"


def error(output: str) -> str:
    """What ended the program, with the program's line: the last error that is not another process's word on it; or its last line."""
    errors: list[tuple[str, str]] = []
    places: dict[str, str] = {}  # the one that each rank's traceback named last
    for line in output.splitlines():
        head = RANK.match(line)
        rank, line = (head[0], line[head.end() :]) if head else ("", line)
        if where := PLACE.search(line):
            if _own(where[1]):
                places[rank] = f" ({os.path.basename(where[1])}:{where[2]})"
        elif line.startswith("Traceback"):
            places[rank] = ""
        elif kind := ERROR.match(line.strip()):
            errors.append((kind[1], line.strip()[:300] + places.get(rank, "")))
    causes = [words for kind, words in errors if not CONSEQUENCES.search(kind)] or [words for _, words in errors]
    return causes[-1] if causes else last_line(output)


def last_line(output: str) -> str:
    """What it printed last, if anything."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _own(path: str) -> bool:
    """Of the program, not of Python, a package or a command such as torchrun."""
    others = (PACKAGE + os.sep, sys.base_prefix + os.sep, sys.prefix + os.sep, "<")
    return "site-packages" not in path and not path.startswith(others) and os.path.basename(path) != "torchrun"
