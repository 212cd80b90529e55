"""Whatever a process started ends with it: its children, theirs, and daemons that left its process group."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

SUBREAPER = 36  # linux/prctl.h, PR_SET_CHILD_SUBREAPER


def keep_tree() -> None:
    """Called by a process at its start, so that `kill_tree` finds all that it will start."""
    if hasattr(os, "setsid"):
        os.setsid()  # a process group of its own
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # a daemon whose parent ends becomes a child of this process


def kill_tree(pid: int) -> None:
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


def end_tree(pid: int) -> None:
    """As `kill_tree`, for a program that starts another process for each that ends, as torchrun does: it is stopped first."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(signal, "SIGSTOP"):
            os.kill(pid, signal.SIGSTOP)
        kill_tree(pid)
        os.kill(pid, signal.SIGKILL)


def end_marked(words: str) -> None:
    """End all processes in whose environment these words stand, whoever their parent is by now; stopped first, so that none starts another.
    Only Linux tells an environment."""
    for number in (signal.SIGSTOP, signal.SIGKILL) * 2:
        for pid in _marked(os.fsencode(words)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _marked(words: bytes) -> list[int]:
    marked = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.exists("/proc/self/environ") else []):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # ended, or another user's
            if words in file.read():
                marked.append(int(name))
    return marked


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
    process_tree = [pid]
    for member in process_tree:
        process_tree += [child for child, parent in parents.items() if parent == member]
    return process_tree[1:]
