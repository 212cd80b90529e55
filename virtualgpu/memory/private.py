"""Memory pools of the program's own (torch.cuda.MemPool): free blocks that only those find who allocate in the pool.

Blocks and segments are as elsewhere, and so are the figures, which count all pools together. As long as somebody holds the pool, its
free segments stay with it, also where memory runs out.
"""

import threading

from virtualgpu import _compat
from virtualgpu.memory.blocks import Pool

NO_POOL = (0, 0)
Id = tuple[int, int]


class PrivatePool:
    """One GPU's part of a pool. uses: who holds it. no_split: each of its segments is one block."""

    def __init__(self, id: Id, statistics):
        self.pools = Pool(True, statistics.small, id), Pool(False, statistics.large, id)
        self.uses, self.no_split = 0, False


class _Thread(threading.local):
    def __init__(self):
        self.inside: list[Id] = []


class PrivatePools:
    """Those of one GPU, and which of them a thread allocates in."""

    def __init__(self, statistics):
        self.statistics = statistics
        self.known: dict[Id, PrivatePool] = {}
        self._thread = _Thread()

    def hold(self, id: Id) -> PrivatePool:
        """One more uses the pool, which is made if there is none of that id."""
        pool = self.known.get(id)
        if pool is None:
            pool = self.known[id] = PrivatePool(id, self.statistics)
        pool.uses += 1
        return pool

    def let_go(self, id: Id) -> None:
        """One fewer uses it; nothing where there is none of that id."""
        if id in self.known:
            self.known[id].uses -= 1

    def begin(self, id: Id) -> None:
        """This thread allocates in the pool from now on."""
        self.hold(id)
        self._thread.inside.append(id)

    def end(self, id: Id) -> None:
        """This thread leaves the pool, which stays held. Raises RuntimeError where it is not in it."""
        if id not in self._thread.inside:
            raise RuntimeError(f"this thread does not allocate in the pool {id}")
        self._thread.inside.remove(id)

    def current(self) -> PrivatePool | None:
        """That of this thread. A backward pass has threads of its own on a GPU, which are in none."""
        inside = self._thread.inside
        return self.known[inside[-1]] if inside and _compat.graph_task() == -1 else None

    def nobodys(self) -> list[Pool]:
        """The pools whose free segments may be given back."""
        return [pool for private in self.known.values() if private.uses <= 0 for pool in reversed(private.pools)]
