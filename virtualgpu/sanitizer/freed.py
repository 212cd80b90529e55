"""Memory that was freed, and who may still use it: what the next tensor there has to wait for."""

from bisect import bisect_left, bisect_right

from virtualgpu.sanitizer.accesses import Access
from virtualgpu.sanitizer.order import Order

KEPT = 4096  # pieces; of more, those that the host knows to be done are forgotten


class FreedMemory:
    """Of one GPU: pieces that do not overlap, by address, each with the accesses to what lay there. Addresses in bytes."""

    def __init__(self):
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, list[Access]]] = []

    def put(self, start: int, end: int, accesses: list[Access], order: Order) -> None:
        """A tensor at those addresses was freed; its accesses count bytes from there."""
        self.take(start, end)
        index = bisect_left(self._starts, start)
        moved = [access.inside(0, end - start, start) for access in accesses]
        self._starts.insert(index, start)
        self._pieces.insert(index, (start, end, moved))
        if len(self._pieces) > KEPT:
            self._pieces = [
                piece
                for piece in self._pieces
                if not all(order.known_to_host(access.queue, access.number) for access in piece[2])
            ][-KEPT // 2 :]
            self._starts = [piece[0] for piece in self._pieces]

    def take(self, start: int, end: int) -> list[Access]:
        """A tensor begins to live there: the accesses to what lay there before, in bytes from its start."""
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._pieces) and self._pieces[first][1] <= start:
            first += 1
        last = bisect_left(self._starts, end, first)
        taken, left = self._pieces[first:last], []
        for low, high, accesses in taken:
            left += [(a, b, accesses) for a, b in ((low, start), (end, high)) if a < b]
        self._pieces[first:last] = left
        self._starts[first:last] = [piece[0] for piece in left]
        inside = [access for _, _, accesses in taken for access in accesses]
        return [access.inside(start, end, -start) for access in inside if access.start < end and start < access.end]
