"""The parts of the simulated clock: a stretch of work, a stream, and what of a GPU the streams share. Times in seconds."""

from bisect import bisect_right
from dataclasses import dataclass, field

DEFAULT = 0  # the id of a GPU's default stream


@dataclass(frozen=True, slots=True)
class Span:
    """Something a GPU did: `kind` is forward, backward, optimizer, copy, waiting (for others, in a collective) or communication; `name` the operation; `annotation` the
    innermost torch.profiler.record_function around its launch; `issued` when the host had launched it."""

    gpu: int
    start: float
    end: float
    kind: str
    name: str
    stream: int = DEFAULT
    annotation: str = ""
    issued: float = field(default=0.0, compare=False, repr=False)


class Queue:
    """One stream of one GPU: work put into it is done at `ready`."""

    __slots__ = ("gpu", "id", "priority", "ready")

    def __init__(self, gpu: int, id: int, priority: int = 0):
        self.gpu, self.id, self.priority, self.ready = gpu, id, priority, 0.0

    def wait_until(self, moment: float) -> None:
        """Work that is put into it from now on starts no earlier."""
        self.ready = max(self.ready, moment)


class Engine:
    """Something of a GPU that serves one stream at a time. Work that is ready early takes a gap that is long enough."""

    __slots__ = ("ends", "floor", "starts")
    KEPT = 4096  # busy stretches; older ones are forgotten, and nothing is placed among them any more

    def __init__(self, floor: float = 0.0):
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.floor = floor

    def reserve(self, earliest: float, seconds: float) -> float:
        """The first moment, not before `earliest`, from which the engine is free for so long; it is then taken."""
        starts, ends = self.starts, self.ends
        start = max(earliest, self.floor)
        if not ends or start >= ends[-1]:
            index = len(ends)
        else:
            index = bisect_right(ends, start)
            while index < len(starts) and starts[index] < start + seconds:
                start = max(start, ends[index])
                index += 1
        self._insert(index, start, start + seconds)
        return start

    def free(self, start: float, end: float) -> None:
        """What was reserved then is not needed."""
        starts, ends = self.starts, self.ends
        index = bisect_right(ends, start)
        if index == len(starts) or not starts[index] <= start < end <= ends[index]:
            return  # forgotten by now
        first, last = starts[index], ends[index]
        starts[index : index + 1] = [moment for moment in (first, end) if moment not in (start, last)]
        ends[index : index + 1] = [moment for moment in (start, last) if moment not in (first, end)]

    def extend(self, start: float, end: float) -> None:
        """It was busy then, after all that it is known to have done."""
        if self.ends and start < self.ends[-1]:
            return
        self._insert(len(self.ends), start, end)

    def cover(self, start: float, end: float) -> list[tuple[float, float]]:
        """It was busy then, in part perhaps as is known already: the parts that are new."""
        parts, start, index = [], max(start, self.floor), bisect_right(self.ends, start)
        while start < end:
            until = min(end, self.starts[index]) if index < len(self.starts) else end
            if start < until:
                parts.append((start, until))
            start, index = max(until, self.ends[index]) if index < len(self.ends) else end, index + 1
        for part in parts:
            self._insert(bisect_right(self.ends, part[0]), *part)
        return parts

    def overlap(self, start: float, end: float) -> float:
        """For how long it was busy between two moments."""
        index, seconds = bisect_right(self.ends, start), 0.0
        while index < len(self.starts) and self.starts[index] < end:
            seconds += min(end, self.ends[index]) - max(start, self.starts[index])
            index += 1
        return seconds

    def _insert(self, index: int, start: float, end: float) -> None:
        """A stretch that touches its neighbours becomes one with them."""
        starts, ends = self.starts, self.ends
        if index and ends[index - 1] == start:
            ends[index - 1] = end
            index -= 1
        else:
            starts.insert(index, start)
            ends.insert(index, end)
        if index + 1 < len(starts) and starts[index + 1] == ends[index]:
            ends[index] = ends.pop(index + 1)
            del starts[index + 1]
        if len(ends) > self.KEPT:
            half = self.KEPT // 2
            self.floor = ends[half - 1]
            del starts[:half], ends[:half]
