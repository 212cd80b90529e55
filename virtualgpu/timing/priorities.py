"""Priorities of streams: a kernel goes before those of lower priority that are queued and have not begun (CUDA C++ Programming Guide,
"Stream Priorities"; one that has begun runs to its end).

Kernels get their time when the host launches them, so that a later launch of higher priority moves others back: their spans, and
what their streams do from now on. What was read from their streams before stays as it was: events that were recorded, and streams
and copies that waited for them. Kernels that were queued before the GPU had a stream with a priority are not moved.
"""

from dataclasses import replace

from virtualgpu.timing.queues import Engine, Queue, Span

KEPT = 4096  # kernels that may still be moved


class _Kernel:
    """One that has its time. place: of its span, where spans are recorded."""

    __slots__ = ("place", "queue", "seconds", "start")

    def __init__(self, queue: Queue, start: float, seconds: float, place: tuple[list[Span], int] | None):
        self.queue, self.start, self.seconds, self.place = queue, start, seconds, place

    @property
    def end(self) -> float:
        """To the last bit what the engine reserved: a sliver that stayed would be in the way of whatever comes."""
        return self.start + self.seconds


class Priorities:
    """Of one GPU, from its first stream with a priority on."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.kernels: list[_Kernel] = []

    def reserve(self, queue: Queue, ready: float, seconds: float, spans: list[Span] | None) -> float:
        """When a kernel begins; those that it goes before are moved. spans: of which its own will be the next."""
        behind = []
        if queue.priority < 0:  # 0 is the lowest
            behind = [one for one in self.kernels if one.start >= ready and one.queue.priority > queue.priority]
            behind.sort(key=lambda one: one.start)
        for one in behind:
            self.engine.free(one.start, one.end)
        start = self.engine.reserve(ready, seconds)
        ends: dict[int, float] = {}  # of each stream: of its kernel before
        for one in behind:
            self._move(one, self.engine.reserve(max(one.start, ends.get(one.queue.id, 0.0)), one.seconds))
            ends[one.queue.id] = one.end
            one.queue.ready = max(one.queue.ready, one.end)
        if len(self.kernels) > KEPT:
            del self.kernels[: KEPT // 2]
        place = None if spans is None else (spans, len(spans))
        self.kernels.append(_Kernel(queue, start, seconds, place))
        return start

    def _move(self, one: _Kernel, start: float) -> None:
        before, one.start = one.start, start
        if start == before:
            return
        if one.place is not None:
            spans, index = one.place
            if index < len(spans) and spans[index].start == before:
                spans[index] = replace(spans[index], start=start, end=one.end)
