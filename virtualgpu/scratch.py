"""What processes keep in the system's folder for temporary files, and who removes it: its maker, or after a kill the next one.

A maker holds a lock on what it made. The system lets go of it when the process ends, however it ends; so what has our name and no
lock is nobody's any more.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

PREFIX = "virtualgpu-"
YOUNG = 60.0  # seconds in which it may have been made and not be locked yet

_held: dict[str, int] = {}  # the open files behind the locks


def folder(where: str | None = None) -> str:
    """A new folder in `where` (the system's folder for temporary files), ours until `remove` or the end of this process.

    Raises OSError where there is no room.
    """
    try:
        where = where or tempfile.gettempdir()
    except FileNotFoundError as error:  # Python has tried to write into several: they are full, read-only or not there
        cure = "free some space, or set TMPDIR to a folder that can be written to"
        raise FileNotFoundError(error.errno, f"{error.strerror}: {cure}") from None
    sweep(where)
    path = tempfile.mkdtemp(prefix=PREFIX, dir=where)
    if os.name == "posix":
        _held[path] = os.open(path, os.O_RDONLY)
        hold(_held[path])
    return path


@contextlib.contextmanager
def lent(where: str | None = None) -> Iterator[str]:
    """A `folder`, removed at the block's end."""
    path = folder(where)
    try:
        yield path
    finally:
        remove(path)


def remove(path: str) -> None:
    """The folder and all in it."""
    shutil.rmtree(path, ignore_errors=True)
    if path in _held:
        os.close(_held.pop(path))


def hold(number: int) -> bool:
    """Lock what is open under this number until it is closed. False: another process has it, or this disk knows no locks."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def sweep(where: str) -> None:
    """Remove what this user's killed processes left there."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError), os.scandir(where) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # another sweeps, too
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry) -> None:
    known = entry.stat(follow_symlinks=False)
    if known.st_uid != os.geteuid() or time.time() - known.st_mtime < YOUNG:
        return
    number = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if not hold(number):
            return
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    finally:
        os.close(number)
