"""A process beside `fit` and `--explain`, which ends the programs that these have started where they are killed (kill -9, a kernel's restart).

It is told of each program by a pipe, and sees the pipe close. Nothing of PyTorch is in it, and signals of the terminal do not reach it.
"""

import contextlib
import os
import subprocess
import sys

from virtualgpu.run.process_tree import end_tree

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CODE = f"""
import sys
sys.path.insert(0, {os.path.dirname(PACKAGE)!r})
from virtualgpu.run.trials import warden
warden.keep_watch(sys.stdin)
"""


class Warden:
    """The process, seen from the one that starts programs."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def note(self, word: str, pid: int) -> None:
        """word: "begun" or "ended", of the program with this number."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            self._process.stdin.write(f"{word} {pid}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Programs that run yet are ended by it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def keep_watch(words) -> None:
    """Until the pipe closes; then nothing of the programs that have not ended is left."""
    running = set()
    for line in words:
        word, pid = line.split()
        running.add(int(pid)) if word == "begun" else running.discard(int(pid))
    for pid in running:
        end_tree(pid)
