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
    """some_dry: is a thread in a dry run? Asked at each operation, before it is asked which. epoch: a number of the present dry runs."""

    some_dry = False
    epoch = 1  # another one after each time in which some thread was in a dry run
    _count, _lock = 0, threading.Lock()

    @classmethod
    def count(cls, step: int) -> None:
        """So many more threads are in a dry run."""
        with cls._lock:
            Anywhere._count = max(
                0, Anywhere._count + step
            )  # a forked process may leave a block that its parent entered
            was, Anywhere.some_dry = Anywhere.some_dry, Anywhere._count > 0
            Anywhere.epoch += was and not Anywhere.some_dry

    @classmethod
    def begin_anew(cls) -> None:
        """In a process that was just forked: its one thread computes with numbers."""
        here.dry, Anywhere._lock = None, threading.Lock()
        Anywhere._count, Anywhere.some_dry, Anywhere.epoch = 0, False, Anywhere.epoch + 1


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
