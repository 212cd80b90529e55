"""Who is alive: what tests ask when nobody may be left behind."""

import contextlib

import psutil


def ranks(below: psutil.Process | None = None) -> list[psutil.Process]:
    """What a forkserver below this process (or another one) has started, and what those started in turn."""
    found = []
    for process in (below or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
            above = (" ".join(parent.cmdline()) for parent in process.parents())
            if process.status() != psutil.STATUS_ZOMBIE and any("forkserver" in line for line in above):
                found.append(process)
    return found
