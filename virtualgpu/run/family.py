"""Whatever a process started ends with it: its children, theirs, and daemons that left its process group."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

SUBREAPER = 36  # linux/prctl.h, PR_SET_CHILD_SUBREAPER


def keep_family() -> None:
    """Called by a process at its start, so that `kill_family` finds all that it will start."""
    if hasattr(os, "setsid"):
        os.setsid()  # a process group of its own
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # a daemon whose parent ends becomes a child of this process


def kill_family(pid: int) -> None:
    """End that process and all below it, also in sessions of their own. Where it has ended already: what is left of
    its group."""
    for _ in range(3):  # a process may start another one meanwhile
        below = _below(pid)
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not below:
            break
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """The living processes below this one; none on Windows, which has neither /proc nor ps."""
    parents: dict[int, int] = {}
    if os.path.exists("/proc/self/stat"):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # proc(5): state, parent; the name may hold anything
                if fields[0] != b"Z":
                    parents[int(name)] = int(fields[1])
    elif os.name == "posix":
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


class Program:
    """A program that others may have broken: what it prints is awaited within limits, and nothing of it is left.

    Raises OSError where it cannot be started.
    """

    def __init__(self, command: Sequence[str]):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
        self._child: subprocess.Popen | None = subprocess.Popen(command, **options)

    def output(self, seconds: float, most: int) -> bytes:
        """What it prints in that time, up to `most` bytes."""
        stream, output = self._child.stdout, []
        reader = threading.Thread(target=lambda: output.append(stream.read(most)), daemon=True)
        reader.start()
        reader.join(seconds)
        self.end()
        reader.join(1.0)  # not for ever: a process that waits for a broken driver cannot be killed
        if output:
            stream.close()
        return b"".join(output)

    def end(self) -> None:
        """A wrapper script may have children; it may have ended, and have left some behind."""
        child, self._child = self._child, None
        if child is not None:
            kill_family(child.pid)
            child.kill()  # Windows has no process groups
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
