"""Who is alive, and waiting for it: what tests ask when nobody may be left behind. And where processes can meet."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

HURRY = 1  # seconds, a time limit for what does not end; that of ranks begins when all of them have begun


def no_end(*args):
    """What does not end."""
    while True:
        time.sleep(0.01)


def ranks(below: psutil.Process | None = None) -> list[psutil.Process]:
    """What a forkserver below this process (or another one) has started, and what those started in turn."""
    found = []
    for process in (below or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
            above = (" ".join(parent.cmdline()) for parent in process.parents())
            if process.status() != psutil.STATUS_ZOMBIE and any("forkserver" in line for line in above):
                found.append(process)
    return found


def alive(pid: int) -> bool:
    """Is there such a process, and has it not ended?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(true: Callable[[], object], seconds: float = 30) -> None:
    """Until that holds; an AssertionError where it does not within the time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def family(name: str, value: str) -> list[psutil.Process]:
    """The living processes that have this variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended, or not ours to ask
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def runs(program: str, name: str, value: str) -> bool:
    """Is one of these processes this program (or script)?"""
    with contextlib.suppress(psutil.Error):  # one may have ended meanwhile
        return any(process.name() == os.path.basename(program) for process in family(name, value))
    return False


def listening(process: psutil.Process, kind: str = "tcp") -> set[tuple[str, int]]:
    """The addresses and ports at which this process and those that it started listen."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            sockets = one.net_connections if hasattr(one, "net_connections") else one.connections  # before psutil 6
            found |= {tuple(socket.laddr) for socket in sockets(kind) if socket.status == psutil.CONN_LISTEN}
    return found


def free_port() -> int:
    """A port of this machine that nobody listens on; somebody else may take it before its user does."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def peak_memory(pid: int) -> int:
    """Bytes that a process has held at most so far (Linux alone tells)."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
