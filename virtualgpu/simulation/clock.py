"""Simulated time: one queue per GPU, and the host that fills them.

Launching a kernel takes the host a moment, and returns before the kernel runs: the host runs ahead, until something makes it
wait. A GPU runs its queue in order. A copy between two GPUs is ordered after the queues of both (PyTorch says so in
`aten/src/ATen/native/cuda/Copy.cu`: "we fully synchronize on both src and dst's current streams").

In a backward pass autograd has one thread per GPU ("Autograd mechanics", PyTorch notes), so that one thread's launches do not
wait for the other's. Work on CPU tensors takes no time here: the clock knows GPUs, and the host only as the one who launches.

All times are in seconds since the GPUs were made.
"""

from dataclasses import dataclass

import torch

from virtualgpu.errors import device_assert

# A launch: 3.8 us, the time per kernel of a queue of short kernels in NVIDIA's "Getting Started with CUDA Graphs" (2019), and
# 2.2 us for PyTorch's own way to it: an addition of two small CPU tensors took 1.5 to 4 us here (tests/bench prints it).
LAUNCH = 3.8e-6 + 2.2e-6


@dataclass(frozen=True, slots=True)
class Span:
    """Something a GPU did: `kind` is forward, backward, optimizer or copy; `name` the operation."""

    gpu: int
    start: float
    end: float
    kind: str
    name: str


class Clock:
    """`ready[g]`: when GPU g has finished all that is queued so far; `busy[g]`: for how long its kernels ran, added up.

    blocking: the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1). After `stop`, calls raise as CUDA's do.
    """

    def __init__(self, gpus: int, blocking: bool = False):
        self.blocking = blocking
        self.stopped: dict[int, float] = {}  # GPUs on which a kernel asserted, and when
        self.ready = [0.0] * gpus
        self.busy = [0.0] * gpus
        self.spans: list[Span] | None = None  # recorded while it is a list
        self.kind = "forward"
        self._host = 0.0
        self._threads: list[float] | None = None  # in a backward pass: each GPU's own launching thread

    @property
    def host(self) -> float:
        """Now, as the program sees it."""
        self._leave_backward()
        return self._host

    def launch(self, gpu: int, seconds: float, name: str) -> None:
        """Queue a kernel that lasts `seconds`."""
        start = max(self._now(gpu, LAUNCH), self.ready[gpu])
        self.ready[gpu] = start + seconds
        self.busy[gpu] += seconds
        self._record(gpu, start, start + seconds, None, name)
        if self.blocking:
            self.wait(gpu)

    def stop(self, gpu: int) -> None:
        """The kernel launched last asserts: calls fail from the moment at which it runs."""
        self.stopped.setdefault(gpu, self.ready[gpu])
        if self.blocking:
            self.wait(gpu)

    def check(self, gpu: int) -> None:
        """Raises CUDA's error if, as far as the host can know now, a kernel of this GPU asserted."""
        if gpu in self.stopped and self.stopped[gpu] <= (self._threads[gpu] if self._threads else self._host):
            raise device_assert()

    def between(self, source: int, target: int, seconds: float) -> None:
        """Queue a copy from one GPU to another: it starts when both have come to it, and both go on when it is done."""
        now = self._now(source, LAUNCH)
        start = max(now, self.ready[source], self.ready[target])
        self.ready[source] = self.ready[target] = start + seconds
        if self._threads is not None:  # the other GPU's thread learns of its next work only now
            self._threads[target] = max(self._threads[target], now)
        for gpu in (source, target):
            self._record(gpu, start, start + seconds, "copy", f"copy cuda:{source} to cuda:{target}")

    def host_copy(self, gpu: int, seconds: float, wait: bool, name: str) -> None:
        """Queue a copy between host and GPU; the host waits for it unless it is asynchronous."""
        start = max(self._now(gpu, LAUNCH), self.ready[gpu])
        self.ready[gpu] = start + seconds
        self._record(gpu, start, start + seconds, "copy", name)
        if wait:
            self.wait(gpu)

    def wait(self, gpu: int | None = None) -> None:
        """The host waits until this GPU's queue, or every queue, is empty."""
        self.wait_until(max(self.ready) if gpu is None else self.ready[gpu])
        for waited_for in range(len(self.ready)) if gpu is None else (gpu,):
            self.check(waited_for)

    def wait_until(self, until: float) -> None:
        """The host waits for a moment."""
        if self._in_backward():
            self._threads = [max(thread, until) for thread in self._threads]
        else:
            self._host = max(self._host, until)

    def _now(self, gpu: int, passed: float) -> float:
        """The moment after the thread that serves this GPU has spent `passed`."""
        if self.stopped:
            self.check(gpu)
        if self._in_backward():
            self._threads[gpu] += passed
            return self._threads[gpu]
        self._host += passed
        return self._host

    def _in_backward(self) -> bool:
        if torch._C._current_graph_task_id() == -1:
            self._leave_backward()
            return False
        if self._threads is None:
            self._threads = [self._host] * len(self.ready)
        return True

    def _leave_backward(self) -> None:
        """backward() returns when every thread has launched its last kernel."""
        if self._threads is not None and torch._C._current_graph_task_id() == -1:
            self._host, self._threads = max(self._host, *self._threads), None

    def _record(self, gpu: int, start: float, end: float, kind: str | None, name: str) -> None:
        if self.spans is not None:
            kind = kind or ("backward" if self._threads is not None else self.kind)
            self.spans.append(Span(gpu, start, end, kind, name))
