"""Collectives on one process's clock: when its streams come to one, who waits for it, and what NCCL's kernels take of a GPU.

When the other ranks come, and how long it lasts, is `virtualgpu.distributed`'s to say.

A kernel of NCCL is there from the moment at which its rank has come to it, also while it waits for the last rank (it polls), so that
nvidia-smi counts all of it as busy. It holds a multiprocessor for each of its blocks, and the kernels beside it have the rest. When it ends is
known only after other ranks have come, and by then the kernels beside it are queued. So they stay where they are, and what they lose is made up
for in one piece: a delay of the stream that next waits for a collective, comes to one, or is waited for by the host (`charge`). A collective
that was launched behind slowed kernels is that much later itself (`lateness`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from virtualgpu.timing.streams import Engine, Queue, Span

COMMUNICATION = 1 << 16  # ids from here on are streams of communicators, of which torch.cuda knows nothing


@dataclass(slots=True)
class _Stretch:
    """One kernel of NCCL. share: of the GPU's processors that it holds. charged: of the delay that it makes, so far."""

    start: float
    end: float
    share: float
    charged: float = 0.0

    def shared(self, kernels: Engine, until: float = float("inf")) -> float:
        """For how long kernels run beside it, slowed as they are."""
        end = max(self.start, min(self.end, until))
        return min(end - self.start, kernels.overlap(self.start, end) / (1 - self.share))

    def delay(self, kernels: Engine, until: float = float("inf")) -> float:
        """What kernels lose beside it."""
        return self.share * self.shared(kernels, until) if self.share else 0.0


class Beside:
    """Of one GPU. kernels: when its kernels ran. Moments in seconds."""

    def __init__(self, kernels: Engine):
        self.kernels = kernels
        self._covered = Engine()  # by kernels of NCCL
        self._open: list[_Stretch] = []  # parts of it, beside which kernels may still be queued
        self._alone = 0.0  # in the other parts, for how long nothing else ran
        self._slowing: list[_Stretch] = []
        self._past = 0.0  # delays of those that are over
        self.charged = 0.0  # delays so far

    def add(self, came: float, end: float, share: float) -> None:
        """A kernel of NCCL is there then."""
        for part in [part for part in self._open if part.end <= came]:  # kernels begin no earlier than this from now on
            self._alone += part.end - part.start - part.shared(self.kernels)
            self._open.remove(part)
        self._open += [_Stretch(*part, share) for part in self._covered.cover(came, end)]
        for one in [one for one in self._slowing if one.end <= came]:
            if one.delay(self.kernels) <= one.charged:
                self._past += one.charged
                self._slowing.remove(one)
        if share:
            self._slowing.append(_Stretch(came, end, share))

    def alone(self) -> float:
        """For how long kernels of NCCL ran and no others, as far as is known."""
        return self._alone + sum(part.end - part.start - part.shared(self.kernels) for part in self._open)

    def charge(self) -> float:
        """What the kernels queued so far lose, and have not been charged yet."""
        more = 0.0
        for one in self._slowing:
            delay = max(one.charged, one.delay(self.kernels))
            more, one.charged = more + delay - one.charged, delay
        self.charged += more
        return more

    def lateness(self, issued: float, charged: float) -> float:
        """Of a kernel of NCCL that was put behind kernels at `issued`, when so much had been charged."""
        return max(0.0, self._past + sum(one.delay(self.kernels, issued) for one in self._slowing) - charged)


class Collectives:
    """Those of one clock, whose GPUs have a stream for each communicator beside their own."""

    def __init__(self, clock):
        self.clock, self.settle = clock, lambda: None
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
        self.clock.set(watched=True)
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
        clock.set(watched=True)
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
