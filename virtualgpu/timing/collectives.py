"""Collectives on one process's clock: when its streams come to one, and who waits for it.

When the other ranks come, and how long it lasts, is `virtualgpu.distributed`'s to say.
"""

from collections.abc import Callable, Sequence

from virtualgpu.timing.beside import Beside
from virtualgpu.timing.queues import Queue, Span

COMMUNICATION = 1 << 16  # ids from here on are streams of communicators, of which torch.cuda knows nothing


class Collectives:
    """Those of one clock, whose GPUs have a stream for each communicator beside their own."""

    def __init__(self, clock):
        self.clock, self.settle = clock, _nothing
        self.reset(0)

    def reset(self, gpus: int) -> None:
        """As new, with so many GPUs."""
        self.streams: list[list[Queue]] = [[] for _ in range(gpus)]
        self.beside = [Beside(self.clock.compute[gpu]) for gpu in range(gpus)]

    def settle_by(self, settle: Callable[[], None]) -> None:
        """`settle` makes the ends of all collectives known, for a host that waits for everything."""
        self.settle = settle

    def come_to(self, gpu: int) -> tuple[float, Queue]:
        """The host launches a collective: the moment at which its stream has come to it, and that stream."""
        self.clock.watch()
        self.charge(gpu)
        now, queue = self.clock.launched(gpu), self.clock.current(gpu)
        return max(now, queue.ready), queue

    def new_stream(self, gpu: int) -> Queue:
        """A stream for a communicator, which runs beside the kernels."""
        queue = Queue(gpu, COMMUNICATION + len(self.streams[gpu]))
        self.streams[gpu].append(queue)
        return queue

    def run(self, queue: Queue, came: float, start: float, end: float, name: str, share: float = 0.0) -> None:
        """A collective runs then, on that stream. came: this rank, which waits for the others until `start`. share: of the GPU's
        processors, which kernels beside it do without.
        """
        queue.wait_until(end)
        self.beside[queue.gpu].add(came, end, share)
        if self.clock.spans is not None:
            if start > came:
                self.clock.spans.append(Span(queue.gpu, came, start, "waiting", f"{name} (waiting)", queue.id))
            self.clock.spans.append(Span(queue.gpu, start, end, "communication", name, queue.id))

    def together(self, gpus: Sequence[int], seconds: float, name: str, share: float) -> None:
        """One of a single process, which launches a kernel on the current stream of each of these GPUs: these begin when all have come."""
        clock, local, came = self.clock, self.clock.local, []
        clock.watch()
        now = max(clock.launched(gpu) for gpu in gpus)
        for gpu in gpus:
            self.charge(gpu)
            if local.backward is not None:  # its thread comes to its next work only now
                local.backward[gpu] = max(local.backward[gpu], now)
            came.append(max(now, clock.current(gpu).ready))
        start = max(came)
        for gpu, moment in zip(gpus, came, strict=True):
            self.run(clock.current(gpu), moment, start, start + seconds, name, share)

    def charge(self, gpu: int) -> None:
        """The current stream is as much later as kernels have lost beside collectives whose end is known."""
        delay = self.beside[gpu].charge()
        if delay:
            self.clock.delay(gpu, delay)

    def wait(self, gpu: int, end: float) -> None:
        """The current stream waits for a moment; the host goes on."""
        self.charge(gpu)
        self.clock.current(gpu).wait_until(end)

    def over(self, end: float) -> bool:
        """Has the host's time passed that moment? Asking takes a moment of it."""
        self.clock.pass_time()
        return end <= self.clock.host


def _nothing() -> None:
    """There are no collectives."""
