"""What ranks print, on its way to the notebook: bytes through a pipe of each rank's own, lines when all have ended.

Small pieces, because the processes that a rank forks (a DataLoader's workers) write to the same pipe: the system
keeps a write of up to PIPE_BUF bytes together (pipe(7)), and multiprocessing sends a message of that size, and the
four bytes of its length before it, as one write.
"""

import io
import os
import select
import sys
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

PIECE = getattr(select, "PIPE_BUF", 512) - 4


def stdout_to(pipe: Connection) -> io.TextIOWrapper:
    """A text stream for `sys.stdout`: whole lines go to the pipe at once, the beginning of one when it is flushed."""
    pieces: Any = _Pieces(pipe)
    return io.TextIOWrapper(pieces, "utf-8", "backslashreplace", newline="\n", line_buffering=True)


class _Pieces(io.RawIOBase):
    """Bytes for the other end of a pipe."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)  # another thread may hold it at that moment

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may print, too

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        data = bytes(data)
        with self._lock:
            for start in range(0, len(data), PIECE):
                self._pipe.send_bytes(data[start : start + PIECE])
        return len(data)

    def fileno(self) -> int:
        """What C and other programs write to: it is shown only where the rank dies."""
        return 1


class Printed:
    """The notebook's end of the pipe. `ended`: nothing more will come."""

    def __init__(self, pipe: Connection):
        self.pipe, self.ended, self._content = pipe, False, bytearray()

    def read(self) -> None:
        """Take in what is there."""
        try:
            while not self.ended and self.pipe.poll():
                self._content += self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.ended = True

    def lines(self) -> list[str]:
        """The last one may have had no end."""
        lines = self._content.decode("utf-8", "replace").split("\n")
        return lines if lines[-1] else lines[:-1]


def show(lines: Iterable[str]) -> None:
    """Print them; characters that the notebook's own stdout does not know (in an ASCII locale) as \\u escapes."""
    for line in lines:
        try:
            print(line)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            print(line.encode(encoding, "backslashreplace").decode(encoding))
