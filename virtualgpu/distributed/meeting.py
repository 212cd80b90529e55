"""Before a group's first collective: ranks meet in the group's store. One that ended, or does not come in time, is named.

Each rank says in the store which process it is when its group is made, and so before it may end.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

from virtualgpu.distributed.arrivals import RankEnded, RankLate
from virtualgpu.memory.ledger import started

LOOK = 0.1  # seconds between two looks for ranks that have ended


class Processes:
    """Which process each rank of a group is: pid and start. `read` is called when all of them have said it."""

    def __init__(self, store, rank: int, size: int):
        self.store, self.size, self.known = store, size, {}
        store.set(f"virtualgpu/process/{rank}", f"{os.getpid()} {started(os.getpid())}")

    def read(self) -> None:
        """Take them in: the store may be gone when they are asked for."""
        for rank in range(self.size):
            pid, start = self.store.get(f"virtualgpu/process/{rank}").split()
            self.known[rank] = int(pid), int(start)

    def gone(self, rank: int) -> bool:
        """Has that rank's process ended?"""
        if rank not in self.known:
            return False
        pid, start = self.known[rank]
        return started(pid) != start


class Meeting:
    """The store, as `Arrivals.meet` uses it. returned: has a rank of the group returned from its function?"""

    def __init__(
        self, store, size: int, timeout: timedelta, processes: Processes | None, returned: Callable[[int], bool]
    ):
        self.store, self.size, self.timeout, self.processes, self.returned = store, size, timeout, processes, returned
        self.until = time.monotonic() + timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        """For the others. Raises RankEnded where the store is gone, as `get`."""
        self._ask(lambda: self.store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """The sum of what all have added. Raises RankEnded where the store is gone, as `get`."""
        return self._ask(lambda: self.store.add(key, amount))

    def get(self, key: str, rank: int = 0) -> bytes:
        """What that rank has set. Raises RankEnded or RankLate where it does not."""
        self.wait({key: rank})
        return self._ask(lambda: self.store.get(key))

    def wait(self, keys: dict[str, int]) -> None:
        """Until all of these are there: each is set by a rank. Raises as `get`."""
        pause, look = 1e-4, time.monotonic() + LOOK
        while not self._ask(lambda: self.store.check(list(keys))):
            now = time.monotonic()
            if now > look:
                look = now + LOOK
                late = [rank for key, rank in keys.items() if not self._ask(lambda key=key: self.store.check([key]))]
                for rank in late:
                    if self._gone(rank) or self.returned(rank):
                        raise RankEnded(rank, alive=not self._gone(rank))
                if now > self.until and late:
                    raise RankLate(late, self.timeout.total_seconds())
            time.sleep(pause)
            pause = min(1e-2, 1.5 * pause)

    def _gone(self, rank: int) -> bool:
        return self.processes is not None and self.processes.gone(rank)

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
