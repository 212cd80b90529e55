"""Simulated time: the streams of each GPU, what of a GPU they share, and the host that fills them.

Launching a kernel takes the host a moment, and returns before the kernel runs: the host runs ahead, until something makes it
wait. A stream runs its work in order. The kernels of all streams of one GPU take turns; copies run beside them, one in each
direction (CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"). A copy between two GPUs is ordered after the current
streams of both (`aten/src/ATen/native/cuda/Copy.cu`: "we fully synchronize on both src and dst's current streams").

Each thread of Python has its own time as a host (streams.py). Work on CPU tensors takes no time here unless it is measured (torch_api/host_time.py).
All times are in seconds since the GPUs were made.
"""

import sys
from collections.abc import Callable, Iterable

from torch import Tensor, is_grad_enabled

from virtualgpu.errors import device_assert
from virtualgpu.hardware.machine import DEFAULT as DEFAULT_HOST
from virtualgpu.hardware.machine import HOSTS, Host
from virtualgpu.timing.host import AVERAGE, LAUNCH, UNRECORDED, HostTime, Weight
from virtualgpu.timing.nccl import Collectives
from virtualgpu.timing.streams import DEFAULT, Engine, HostThread, Queue, Span, graph_task

__all__ = ["DEFAULT", "LAUNCH", "Clock", "Queue", "Span"]


class Clock(HostTime):
    """`computing[g]`: for how long the kernels of GPU g ran, added up. `busy[g]`: the same with NCCL's kernels, also while these
    wait for other ranks; what runs at the same time counts once. After `stop`, calls raise as CUDA's do.

    blocking: the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1). costs: what an operation costs the host. on_wait: called when the
    host has waited for a GPU, before_wait when it is about to wait for a stream. spans: recorded while it is a list. watched: are kernels' times
    kept, to see what of the communication they hide? synchronized: how often the host has waited for all of a GPU. gap: seconds from the end of a
    kernel to the next that waits for it.
    """

    gap = 0.0

    def __init__(
        self,
        gpus: int,
        costs: Host = HOSTS[DEFAULT_HOST],
        on_wait: Callable[[], None] | None = None,
        stream_of_leaf: Callable[[Tensor], Queue | None] | None = None,
    ):
        super().__init__(costs, stream_of_leaf)
        self.on_wait, self.before_wait = on_wait, None
        self.blocking = self.watched = False
        self.spans: list[Span] | None = None
        self.collectives = Collectives(self)
        self.reset(gpus)

    def reset(self, gpus: int) -> None:
        """As new, at time zero, with so many GPUs. Settings and who records stay."""
        super().reset(gpus)
        self.watched, self.synchronized = False, 0
        self.stopped: dict[int, float] = {}  # GPUs on which a kernel asserted, and when
        self.asserted: dict[int, str] = {}  # and what is still to be printed of it
        self.copies = {(gpu, way): Engine() for gpu in range(gpus) for way in ("in", "out", "peer")}
        self.computing = [0.0] * gpus
        self.collectives.reset(gpus)

    def set(self, **settings) -> None:
        """blocking, before_wait, costs or watched, as above, and what a clock of another kind has."""
        vars(self).update(settings)

    def become(self, kind: "type[Clock]", **settings) -> None:
        """A clock of another kind, with its settings, on which the same has happened: what `--explain` changes."""
        self.__class__ = kind
        self.set(**settings)

    def record(self, spans: list[Span] | None) -> list[Span] | None:
        """From now on, what the GPUs do goes to this list. Returns where it went before."""
        before, self.spans = self.spans, spans
        return before

    def set_kind(self, kind: str) -> None:
        """What this thread launches from now on is for (forward, backward, optimizer), outside a backward pass."""
        self.local.kind = kind

    def delay(self, gpu: int, seconds: float) -> None:
        """Kernels of the current stream took so much longer."""
        self.current(gpu).ready += seconds
        self.computing[gpu] += seconds

    # -- time

    @property
    def busy(self) -> list[float]:
        """As nvidia-smi counts: of work already queued, and collectives whose end is known."""
        beside = self.collectives.beside
        return [seconds + beside[gpu].alone() for gpu, seconds in enumerate(self.computing)]

    def ready(self, gpu: int) -> float:
        """When this GPU has done all that is queued so far, on every stream."""
        beside = self.collectives.streams[gpu]
        if not self.multi and not beside:
            return self.default[gpu].ready
        return max(queue.ready for queue in (*self.queues[gpu].values(), *beside))

    def latest(self) -> float:
        """The end of all that the program has done or queued."""
        return max([self.host, *(self.ready(gpu) for gpu in range(len(self.queues)))])

    # -- work

    def launched(self, gpu: int) -> float:
        """The host has launched something on this GPU: now."""
        return self._passed(self.local, gpu, self.costs.launch)

    def launch(
        self, gpu: int, seconds: float, name: str, after: float = 0.0, more: float = 0.0, weight: Weight = AVERAGE
    ) -> float:
        """Queue a kernel that lasts `seconds`, and starts when `after` has passed; returns its end. more: seconds of the host beyond
        what an operation of that weight costs it anyway."""
        local, costs = self.local, self.costs
        threads = local.backward
        if self.stopped or (threads is None) is not (graph_task() == -1):
            cost = self._cost_in_backward(local, weight) if self._in_backward(local) else self._cost(weight)
            now = self._passed(local, gpu, more + cost)
        elif threads is None:
            cost = costs.optimizer
            if local.kind == "forward":
                cost = costs.forward * weight.forward * (1.0 if is_grad_enabled() else UNRECORDED)  # as `_cost`
            now = local.now + more + cost
            if local.replicas > 1 or local.contends or self.lock is not None:
                now = self._turn(local, now)
            local.now = now
        else:
            now = threads[gpu] = threads[gpu] + more + self._cost_in_backward(local, weight)
        if self.multi:
            queue = self.current(gpu)
            ready = max(now, after, queue.ready + self.gap * (now <= queue.ready))
            ranked = self.ranked.get(gpu)
            if ranked is None:
                start = self.compute[gpu].reserve(ready, seconds)
            else:
                start = ranked.reserve(queue, ready, seconds, self.spans)
        else:
            queue = self.default[gpu]
            start = now if now > queue.ready else queue.ready + self.gap
            if self.watched:
                self.compute[gpu].extend(start, start + seconds)
        queue.ready = end = start + seconds
        self.computing[gpu] += seconds
        if self.spans is not None:
            self._record(queue, start, end, "backward" if local.backward is not None else local.kind, name, now)
        if self.blocking:
            self.wait(gpu)
        return end

    def spin(self, gpu: int, seconds: float, name: str) -> None:
        """Queue a kernel of one thread, which leaves the rest of the GPU to the kernels of other streams. Beside these it does not
        count as busy.
        """
        if not self.multi:
            self.launch(gpu, seconds, name)
            return
        now, queue = self._passed(self.local, gpu, self.costs.launch), self.current(gpu)
        kind = "backward" if self.local.backward is not None else self.local.kind
        self._put(queue, max(now, queue.ready), seconds, kind, name, now)
        if self.blocking:
            self.wait(gpu)

    def stop(self, gpu: int, said: str = "") -> None:
        """The kernel launched last asserts, and prints what is `said`: calls fail from the moment at which it runs."""
        self.stopped.setdefault(gpu, self.current(gpu).ready)
        self.asserted.setdefault(gpu, said)
        if self.blocking:
            self.wait(gpu)

    def check(self, gpu: int) -> None:
        """Raises CUDA's error if, as far as the host can know now, a kernel of this GPU asserted."""
        if gpu in self.stopped:
            local = self.local
            if self.stopped[gpu] <= (local.now if local.backward is None else local.backward[gpu]):
                if said := self.asserted.get(gpu):
                    print(said, file=sys.stderr, flush=True)
                    self.asserted[gpu] = ""
                raise device_assert(self.blocking)

    def between(self, source: int, target: int, seconds: float) -> None:
        """Queue a copy from one GPU to another: it starts when both have come to it, and both go on when it is done."""
        local = self.local
        now = self._passed(local, source, self.costs.launch)
        here, there = self.current(source), self.current(target)
        start = max(now, here.ready, there.ready)
        if self.multi:
            start = self.copies[source, "peer"].reserve(start, seconds)
        if local.backward is not None:  # the thread of the target comes to its next work only now
            local.backward[target] = max(local.backward[target], now)
        for queue in (here, there):
            self._put(queue, start, seconds, "copy", f"copy cuda:{source} to cuda:{target}", now)

    def host_copy(self, gpu: int, seconds: float, wait: bool, name: str, way: str, aloud: bool = True) -> None:
        """Queue a copy from ("in") or to ("out") the host; the host waits for it unless it is asynchronous. aloud: see `wait_for`."""
        local = self.local
        now = self._passed(local, gpu, self.costs.launch)
        queue = self.current(gpu)
        start = max(now, queue.ready)
        if self.multi:
            start = self.copies[gpu, way].reserve(start, seconds)
        self._put(queue, start, seconds, "copy", name, now)
        if wait:
            self.wait_for(queue, aloud)

    def _passed(self, local: HostThread, gpu: int, seconds: float) -> float:
        """The moment after the thread that serves this GPU has spent `seconds`; then it launches, which fails if a kernel asserted."""
        if self._in_backward(local) and local.backward is not None:
            local.backward[gpu] += seconds
            now = local.backward[gpu]
        else:
            now = local.now + seconds
            if local.replicas > 1 or local.contends or self.lock is not None:
                now = self._turn(local, now)
            local.now = now
        if self.stopped:
            self.check(gpu)
        return now

    def _put(self, queue: Queue, start: float, seconds: float, kind: str, name: str, issued: float) -> None:
        queue.ready = start + seconds
        if self.spans is not None:
            self._record(queue, start, queue.ready, kind, name, issued)

    def _record(self, queue: Queue, start: float, end: float, kind: str, name: str, issued: float) -> None:
        assert self.spans is not None
        annotation = self.local.annotations[-1] if self.local.annotations else ""
        self.spans.append(Span(queue.gpu, start, end, kind, name, queue.id, annotation, issued))

    # -- waiting

    def wait(self, gpu: int | None = None) -> None:
        """The host waits until this GPU's streams, or those of all, are empty."""
        self.synchronized += 1
        with self.ours():
            self.collectives.settle()
        gpus = range(len(self.queues)) if gpu is None else (gpu,)
        for index in gpus:
            self.collectives.charge(index)
        self._wait(max((self.ready(index) for index in gpus), default=0.0), gpus)

    def wait_for(self, queue: Queue, aloud: bool = True) -> None:
        """The host waits until this stream is empty. aloud: `before_wait` is called, as PyTorch would know of it."""
        if aloud and self.before_wait is not None:
            self.before_wait()
        self._wait(queue.ready, (queue.gpu,))

    def _wait(self, until: float, gpus: Iterable[int]) -> None:
        self.wait_until(until)
        for gpu in gpus:
            self.check(gpu)
        if self.on_wait is not None:
            self.on_wait()
