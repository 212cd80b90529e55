"""Streams of a GPU, what of it their kernels share, and to which stream each thread's work goes, also in a backward pass. Times in seconds.

Each thread of Python has its own time as a host, and its own current streams. In a backward pass autograd has one thread per GPU
("Autograd mechanics", PyTorch notes), so that one thread's launches do not wait for the other's; an operation of it runs on the
stream of its forward operation.

Priorities: a kernel goes before those of lower priority that are queued and have not begun (CUDA C++ Programming Guide, "Stream Priorities"; one
that has begun runs to its end). Kernels get their time when the host launches them, so that a later launch of higher priority moves others back:
their spans, and what their streams do from now on. What was read from their streams before stays as it was: events that were recorded, and
streams and copies that waited for them.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from virtualgpu import _compat
from virtualgpu.timing.trace import Span

DEFAULT = 0  # the id of a GPU's default stream
POOL = 32  # streams of one priority: torch.cuda.Stream() gives them in turn (c10/cuda/CUDAStream.h)
NODES = 100_000  # forward operations whose stream is remembered for the backward pass

graph_task = _compat.graph_task  # -1 outside a backward pass


@dataclass(slots=True, eq=False)
class Queue:
    """One stream of one GPU: work put into it is done at `ready`."""

    gpu: int
    id: int
    priority: int = 0
    ready: float = 0.0

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
        ends = self.ends
        if ends and start == ends[-1]:
            ends[-1] = end
        elif not ends or start > ends[-1]:
            self.starts.append(start)
            ends.append(end)
            if len(ends) > self.KEPT:
                self._forget()

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
            self._forget()

    def _forget(self) -> None:
        """The older half."""
        half = self.KEPT // 2
        self.floor = self.ends[half - 1]
        del self.starts[:half], self.ends[:half]


@dataclass(slots=True)
class _Kernel:
    """One that has its time. place: of its span, where spans are recorded."""

    queue: Queue
    start: float
    seconds: float
    place: tuple[list[Span], int] | None

    @property
    def end(self) -> float:
        """To the last bit what the engine reserved: a sliver that stayed would be in the way of whatever comes."""
        return self.start + self.seconds


class Priorities:
    """Of one GPU, from its first stream with a priority on: kernels that were queued before are not moved."""

    MOVABLE = 4096  # kernels that may still be moved

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
        if len(self.kernels) > self.MOVABLE:
            del self.kernels[: self.MOVABLE // 2]
        self.kernels.append(_Kernel(queue, start, seconds, None if spans is None else (spans, len(spans))))
        return start

    def _move(self, one: _Kernel, start: float) -> None:
        before, one.start = one.start, start
        spans, index = one.place or ([], 0)
        if index < len(spans) and spans[index].start == before:
            spans[index] = replace(spans[index], start=start, end=one.end)


class HostThread(threading.local):
    """One thread of Python, as a host."""

    def __init__(self):
        self.now = 0.0
        self.replicas = 1  # threads that do the same at the same time, this one among them (nn.DataParallel)
        self.contends = False  # was it started beside another one?
        self.kind = "forward"  # what the kernels it launches are for, outside a backward pass
        self.annotations: list[str] = []  # torch.profiler.record_function's names, the innermost last
        self.streams: dict[int, Queue] = {}  # of each GPU, where not the default one
        self.backward: list[float] | None = None  # in a backward pass: each GPU's own launching thread
        self.node = None  # of the backward pass, that `streams` was set for
        self.launched_by: int | None = None  # the node of C++ whose operation was the last
        self.outside: dict[int, Queue] = {}  # `streams` as it was before the backward pass

    def begin(self, now: float, replicas: int) -> None:
        """Another thread has started this one: it goes on from that one's time, beside it or, with so many alike, while it waits."""
        self.now, self.replicas, self.contends = max(self.now, now), replicas, replicas == 1


class Streams:
    """The streams of each GPU, what of it their kernels share, and which of them are current."""

    def __init__(self, stream_of_leaf: Callable[[Tensor], Queue | None] | None = None):
        """stream_of_leaf: that of a leaf's first use in the forward pass, on which autograd adds up its gradient; None: not known."""
        self.stream_of_leaf = stream_of_leaf or (lambda leaf: None)

    def reset(self, gpus: int) -> None:
        """As new, with so many GPUs."""
        self.queues: list[dict[int, Queue]] = [{DEFAULT: Queue(gpu, DEFAULT)} for gpu in range(gpus)]
        self.default = [queues[DEFAULT] for queues in self.queues]
        self.compute = [Engine() for _ in range(gpus)]
        self.multi = False  # somebody uses streams of their own; before that, all of a GPU's work is one queue
        self.ranked: dict[int, Priorities] = {}  # of GPUs that have a stream with a priority
        self.local = HostThread()
        self._made: list[dict[int, int]] = [{} for _ in range(gpus)]  # streams of each priority
        self._streams_of_nodes: dict[tuple[int, int], Queue] = {}

    def stream(self, gpu: int, id: int) -> Queue:
        """The stream of that id. Raises RuntimeError where there is none."""
        try:
            return self.queues[gpu][id]
        except (KeyError, IndexError):
            raise RuntimeError(f"cuda:{gpu} has no stream with the id {id}: make one by torch.cuda.Stream()") from None

    def new_stream(self, gpu: int, priority: int = 0) -> Queue:
        """The next stream of the GPU's pool for this priority: 0, or down to -3 for higher ones."""
        priority = max(-3, min(0, priority))
        made = self._made[gpu].get(priority, 0)
        self._made[gpu][priority] = made + 1
        id = made % POOL << 5 | (1 - priority) << 1 | 1
        queue = self.queues[gpu].setdefault(id, Queue(gpu, id, priority))
        if priority and gpu not in self.ranked:
            self.ranked[gpu] = Priorities(self.compute[gpu])
            if not self.multi:
                self._begin_multi()
        return queue

    def current(self, gpu: int) -> Queue:
        """The stream that this thread's next work on the GPU goes to; in a backward pass, that of the forward operation."""
        if not self.multi:
            return self.default[gpu]
        local = self.local
        if self._in_backward(local):
            self._enter_node(local)
        return local.streams.get(gpu) or self.default[gpu]

    def use(self, queue: Queue) -> None:
        """This stream becomes current for this thread."""
        local = self.local
        if queue.id != DEFAULT and not self.multi:
            self._begin_multi()
        if self._in_backward(local):
            self._enter_node(local)
        local.streams = {**local.streams, queue.gpu: queue}

    def note_node(self, gpu: int) -> None:
        """A forward operation is being run: its backward one will be on the same stream. The first of a node counts."""
        known = self._streams_of_nodes
        if len(known) > NODES:
            for key in list(known)[: NODES // 2]:
                del known[key]
        known.setdefault((gpu, _compat.next_sequence_number() - 1), self.local.streams.get(gpu) or self.default[gpu])

    def _begin_multi(self) -> None:
        for gpu, queue in enumerate(self.default):
            self.compute[gpu].floor = queue.ready
        self.multi = True

    def begins(self) -> float:
        """Seconds until autograd's threads are awake."""
        return 0.0

    def _in_backward(self, local: HostThread) -> bool:
        if graph_task() == -1:
            if local.backward is not None:
                self._leave_backward(local)
            return False
        if local.backward is None:
            local.backward = [local.now + self.begins()] * len(self.queues)
            if local.kind == "optimizer":  # the last step raised, or this is in its closure
                local.kind = "forward"
            local.outside, local.node, local.launched_by = local.streams, None, None
        return True

    def _enter_node(self, local: HostThread) -> None:
        """Autograd makes the streams of a node's forward operation current before it calls the node."""
        node = _compat.current_node()
        leaf = getattr(node, "variable", None)  # of a node that adds up a gradient
        key: Any = None if node is None else id(leaf) if leaf is not None else _compat.sequence_number(node)
        if key == local.node:  # also None: a callback at the end of the pass, which may have chosen streams of its own
            return
        local.node = key
        if node is None:  # the first of these callbacks
            local.streams = local.outside
        elif leaf is not None:
            queue = self.stream_of_leaf(leaf)
            local.streams = {} if queue is None else {queue.gpu: queue}
        else:
            pairs = ((gpu, self._streams_of_nodes.get((gpu, key))) for gpu in range(len(self.queues)))
            local.streams = {gpu: queue for gpu, queue in pairs if queue is not None}

    def _leave_backward(self, local: HostThread) -> None:
        """backward() returns when every thread has launched its last kernel; the caller's streams wait for those it used."""
        local.now, local.backward = max([local.now, *(local.backward or ())]), None
        if self.multi:
            local.streams, local.node = local.outside, None
            used = {id(queue) for queue in (*self._streams_of_nodes.values(), *self.default)}
            for gpu, queues in enumerate(self.queues):
                queue = local.streams.get(gpu) or self.default[gpu]
                queue.wait_until(max(one.ready for one in queues.values() if id(one) in used))
