"""A Python that has PyTorch loaded, and what it starts: scripts forked from it, each of which would take two seconds to import PyTorch.

On Linux: elsewhere a fork of so much is not safe, or there is none. `forked` is what runs in it.
"""

import array
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from virtualgpu import environment
from virtualgpu.run.trials.warden import PACKAGE

CODE = f"""
import sys
sys.path[0] = {os.path.dirname(PACKAGE)!r}
from virtualgpu.run.trials import forked
forked.serve(int(sys.argv[1]))
"""
OF_ONE = (environment.VARIABLE, "PATH")  # what two trials' environments differ in


class WarmPython:
    """The process, seen from the one that wants programs started. It starts with the first of them, with that one's environment."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._environ: dict[str, str] | None = None
        self._socket: socket.socket | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str], output) -> "Forked | None":
        """As subprocess.Popen, in a session of its own; None for what is better started by that: no script of this Python, another
        environment, no virtual GPUs, or this process could not be started."""
        if sys.platform != "linux" or environment.VARIABLE not in environ or not _is_script(command):
            return None
        with self._lock:
            if self._environ is None:
                self._begin(environ)
            if self._socket is None or _common(environ) != self._environ:
                return None
            theirs, ours = os.pipe()
            words = [os.getcwd(), *(environ.get(name, "") for name in OF_ONE), *command[1:]]
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [output.fileno(), ours]))]
                self._socket.sendmsg(["\0".join(words).encode(errors="surrogateescape")], rights)
            except OSError:  # it has gone, or these are too many words for it
                os.close(theirs)
                return None
            finally:
                os.close(ours)
        try:
            return Forked(theirs)
        except EOFError:
            return None

    def end(self) -> None:
        """Who waits for its answer gets none. What it has started goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()

    def _begin(self, environ: Mapping[str, str]) -> None:
        self._environ = _common(environ)
        with contextlib.suppress(OSError):  # no process more: the program's own start will say so
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", CODE, str(other.fileno())],
                    env={**self._environ, "PATH": environ.get("PATH", os.defpath)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=True,
                )


class Forked:
    """A program that a warm Python has started, with the part of Popen that `Programs` needs. Raises EOFError if it has not."""

    def __init__(self, told: int):
        self._told = os.fdopen(told, "rb", buffering=0)
        self._status: int | None = None
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Its status, negative for a signal. Raises TimeoutExpired, as Popen's does."""
        if self._status is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program", timeout or 0)
            try:
                self._status = os.waitstatus_to_exitcode(self._number())
            except EOFError:  # who waited for it was killed
                self._status = -signal.SIGKILL
            self._told.close()
        return self._status

    def kill(self) -> None:
        """End it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        line = self._told.readline()
        if not line:
            self._told.close()
            raise EOFError
        return int(line)


def _is_script(command: Sequence[str]) -> bool:
    """Source code for this Python, without a flag for it."""
    if command[0] != sys.executable or command[1].startswith("-"):
        return False
    try:
        with open(command[1], "rb") as file:
            return command[1].endswith(".py") or file.read(2) == b"#!"
    except OSError:  # Python says what is wrong
        return False


def _common(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in OF_ONE}
