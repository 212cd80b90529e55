"""Collectives on one process's clock: when its streams come to one, and who waits for it.

When the other ranks come, and how long it lasts, is `virtualgpu.distributed`'s to say.
"""

from collections.abc import Callable

from virtualgpu.simulation.queues import Queue, Span

COMMUNICATION = 1 << 16  # ids from here on are streams of communicators, of which torch.cuda knows nothing


class Collectives:
    """settle: makes the ends of all collectives known, for a host that waits for everything."""

    def __init__(self, clock, gpus: int):
        self.clock = clock
        self.streams: list[list[Queue]] = [[] for _ in range(gpus)]
        self.settle: Callable[[], None] | None = None

    def come_to(self, gpu: int) -> tuple[float, Queue]:
        """The host launches a collective: the moment at which its stream has come to it, and that stream."""
        self.clock.watched = True
        now, queue = self.clock.launched(gpu), self.clock.current(gpu)
        return max(now, queue.ready), queue

    def new_stream(self, gpu: int) -> Queue:
        """A stream for a communicator, which runs beside the kernels."""
        queue = Queue(gpu, COMMUNICATION + len(self.streams[gpu]))
        self.streams[gpu].append(queue)
        return queue

    def run(self, queue: Queue, start: float, end: float, name: str) -> None:
        """A collective runs then, on that stream."""
        queue.ready = max(queue.ready, end)
        if self.clock.spans is not None:
            self.clock.spans.append(Span(queue.gpu, start, end, "communication", name, queue.id))

    def wait(self, gpu: int, end: float) -> None:
        """The current stream waits for a moment; the host goes on."""
        queue = self.clock.current(gpu)
        queue.ready = max(queue.ready, end)

    def over(self, end: float) -> bool:
        """Has the host's time passed that moment? Asking takes a moment of it."""
        self.clock.pass_time()
        return end <= self.clock.host
