"""Before a group's first collective: ranks meet in the group's store. One that ended, or does not come in time, is named, here and
wherever else ranks wait for each other (`explain`).

Each rank says in the store which process it is when its group is made, and so before it may end.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist

from virtualgpu.distributed.arrivals import LEFT, RAISED, RankEnded, RankLate
from virtualgpu.memory.ledger import started

ORDER = "Do all ranks call the same collectives in the same order?"
LOOK = 0.1  # seconds between two looks for ranks that have ended


class Process(NamedTuple):
    """Of one rank, as it says when its group is made."""

    pid: int
    start: int

    @property
    def is_gone(self) -> bool:
        """Has it ended?"""
        return started(self.pid) != self.start


def announce(store, rank: int) -> None:
    """This rank says in its group's store which process it is."""
    store.set(f"virtualgpu/process/{rank}", f"{os.getpid()} {started(os.getpid())}")


def processes(store, size: int) -> list[Process]:
    """All ranks' processes, once they have said it: the store may be gone when they are asked for."""
    return [Process(*map(int, store.get(f"virtualgpu/process/{rank}").split())) for rank in range(size)]


class Meeting:
    """The store, as `Arrivals.meet` uses it. processes: of all ranks, or none. returned: has a rank of the group returned from its
    function?"""

    def __init__(self, store, size: int, timeout: timedelta, processes: list[Process], returned: Callable[[int], bool]):
        self.store, self.size, self.timeout, self.processes, self.returned = store, size, timeout, processes, returned
        self.until = time.monotonic() + timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        """For the others. Raises RankEnded where the store is gone, as `get`."""
        self._ask(lambda: self.store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """The sum of what all have added. Raises RankEnded where the store is gone, as `get`."""
        return self._ask(lambda: self.store.add(key, amount))

    def get(self, key: str, rank: int = 0, other_than: bytes | None = None) -> bytes:
        """What that rank has set, after another value that it had set before. Raises RankEnded or RankLate where it does not."""
        self.wait({key: rank}, other_than)
        return self._ask(lambda: self.store.get(key))

    def wait(self, keys: dict[str, int], other_than: bytes | None = None) -> None:
        """Until all of these are there: each is set by a rank. Raises as `get`."""
        pause, look = 1e-4, time.monotonic() + LOOK

        def there(*names: str) -> bool:
            known = self.store.check(list(names))
            return known and (other_than is None or all(self.store.get(name) != other_than for name in names))

        while not self._ask(lambda: there(*keys)):
            now = time.monotonic()
            if now > look:
                look = now + LOOK
                late = [rank for key, rank in keys.items() if not self._ask(lambda key=key: there(key))]
                for rank in late:
                    if self._gone(rank) or self.returned(rank):
                        raise RankEnded(rank, 0 if self._gone(rank) else LEFT)
                if now > self.until and late:
                    raise RankLate(late, self.timeout.total_seconds())
            time.sleep(pause)
            pause = min(1e-2, 1.5 * pause)

    def _gone(self, rank: int) -> bool:
        return bool(self.processes) and self.processes[rank].is_gone

    def _ask(self, question: Callable):
        """The process that holds the store is most often a rank, and may have ended."""
        try:
            return question()
        except RuntimeError:
            time.sleep(LOOK)  # a process that is ending closes its sockets first
            for rank in range(self.size):
                if self._gone(rank):
                    raise RankEnded(rank) from None
            raise


def explain(
    error: RuntimeError,
    what: str,
    rank: int,
    group: str,
    ranks: Sequence[int],
    timeout: timedelta,
    ended: Callable[[], list[int]] = list,
    behind: Callable[[], list[int]] = list,
) -> None:
    """Raises DistBackendError, which names the ranks that did not come; returns where the error is about something else.

    what: this rank, a member of that group, waited in; ranks: the global rank of each member; ended, behind: the members that are gone,
    and that are late, where the error does not say.
    """
    if isinstance(error, (torch.OutOfMemoryError, dist.DistBackendError)):
        return
    where, text = f"{what} of rank {ranks[rank]} in group {group!r}", str(error)
    if isinstance(error, RankEnded) and error.left == RAISED:
        message = f"{where}: {_names([error.rank], ranks)} will not come to it: it raised an error, which stands in its own output"
    elif isinstance(error, RankEnded) and error.left:
        message = f"{where}: {_names([error.rank], ranks)} will not come to it: it has returned, or destroyed the group. {ORDER}"
    elif isinstance(error, RankEnded) or "Connection closed by peer" in text or "Connection reset" in text:
        gone = [error.rank] if isinstance(error, RankEnded) else ended()
        message = f"{where}: {_names(gone, ranks)} has ended, and this rank waited for it. What stopped it stands in its own output"
    elif isinstance(error, RankLate) or "timed out" in text.lower():
        late = error.ranks if isinstance(error, RankLate) else behind()
        message = (
            f"{where} timed out after {timeout.total_seconds():g} s: {_names(late, ranks)} had not come to it. {ORDER} "
            f"The limit is {_made_by(group)}(timeout=...)"
        )
    else:
        return
    raise dist.DistBackendError(message) from error


def _made_by(group: str) -> str:
    """The function that makes a group of that name, whose timeout it has: new_group does not take the one of init_process_group over."""
    world = dist.group.WORLD
    return "init_process_group" if world is None or world.group_name == group else "new_group"


def _names(members: list[int], ranks: Sequence[int]) -> str:
    return f"rank {', '.join(str(ranks[member]) for member in members)}" if members else "another rank"
