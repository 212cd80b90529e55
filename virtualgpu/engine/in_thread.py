"""A dry run holds for the thread that is in it, and for the threads and a pool's work that it starts meanwhile: not for others.

So two threads may have dry runs that overlap, or one a dry run while the other computes with numbers.
"""

import contextlib
import threading
from collections.abc import Iterator


class _Here(threading.local):
    dry: bool | None = None  # None: as all of the machine's threads


here = _Here()


class Anywhere:
    """`some_dry`: is a thread in a dry run? Asked at each operation, before it is asked which."""

    some_dry = False
    _count, _lock = 0, threading.Lock()

    @classmethod
    def count(cls, step: int) -> None:
        """So many more threads are in a dry run."""
        with cls._lock:
            Anywhere._count = max(
                0, Anywhere._count + step
            )  # a forked process may leave a block that its parent entered
            Anywhere.some_dry = Anywhere._count > 0

    @classmethod
    def begin_anew(cls) -> None:
        """In a process that was just forked: its one thread computes with numbers."""
        here.dry, Anywhere._lock = None, threading.Lock()
        Anywhere._count, Anywhere.some_dry = 0, False


@contextlib.contextmanager
def dry_here(dry: bool | None) -> Iterator[None]:
    """In this block this thread works on shapes alone (True), with numbers (False), or as all of the machine's threads (None)."""
    before, here.dry = here.dry, dry
    Anywhere.count(bool(dry))
    try:
        yield
    finally:
        here.dry = before
        Anywhere.count(-bool(dry))
