"""What this process's collectives came to, for the table at the end of a run."""

from virtualgpu.memory.ledger import Communication
from virtualgpu.timing.clock import Clock


class Statistics:
    """Of all communicators of a process together."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.count = self.nbytes = 0
        self.seconds = self.waited = self._hidden = 0.0
        self._open: list[tuple[int, float, float]] = []  # (gpu, begin, end): kernels beside it may still be queued

    def add(self, gpu: int, begin: float, end: float, nbytes: int, waited: float, count: int = 1) -> None:
        """A collective, or `count` messages. waited: for how long after this rank the last one came."""
        self.count += count
        self.nbytes += nbytes
        self.seconds += end - begin
        self.waited += waited
        self._open.append((gpu, begin, end))
        self._look(self.clock.host)

    def total(self) -> Communication:
        """So far; the rest of the kernels is taken to be queued."""
        self._look(float("inf"))
        return Communication(self.count, self.nbytes, self.seconds, self._hidden, self.waited)

    def _look(self, now: float) -> None:
        """What kernels hid of the collectives that were over by then."""
        for gpu, begin, end in self._open:
            if end <= now:
                self._hidden += self.clock.compute[gpu].overlap(begin, end)
        self._open = [entry for entry in self._open if entry[2] > now]
