"""The detector: it is told what streams and the host do, in the order of the program, and raises at the first race.

An access is checked against those to the same bytes before it, of which one of the two writes: has its stream waited for the other's
(`order`)? The bytes are those of a storage; when it is freed, what others may still do with them goes on to the next tensor there
(`freed`). Of memory on the host only pinned storages are watched, while copies in the background use them.
"""

import threading
from collections import deque

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of, sparse_parts
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.sanitizer import frames
from virtualgpu.sanitizer.accesses import Access, Accesses
from virtualgpu.sanitizer.freed import FreedMemory
from virtualgpu.sanitizer.order import Order
from virtualgpu.sanitizer.report import race
from virtualgpu.timing.collectives import COMMUNICATION
from virtualgpu.timing.streams import Queue

ON_HOST = "_virtual_accesses"  # the attribute of a storage on the host that copies in the background use


class Detector:
    """Of one machine. Its methods `work` and `host` raise UnsynchronizedAccessError; the others only listen."""

    def __init__(self, machine: Machine):
        self.machine, self.clock, self.order = machine, machine.clock, Order()
        self.lock = threading.RLock()
        self._freed: deque = deque()  # by destructors, which may run anywhere
        self._memory: dict[int, FreedMemory] = {}
        self._backward = threading.local()

    # -- accesses

    def work(self, operation: str) -> "Work":
        """An operation begins, on the streams of the tensors that it will `touch`."""
        return Work(self, operation)

    def host(self, operation: str, tensor: torch.Tensor, writes: bool = False, argument: str = "") -> None:
        """The host reads a tensor that is the CPU's, or writes to it, now."""
        accesses = getattr(_storage(tensor), ON_HOST, None)
        if accesses is None or accesses.of is not self or not tensor.numel():
            return
        with self.lock:
            access = Access(tensor, operation, argument, writes, frames.here())
            old = accesses.conflict(access, self.order)
            if old is not None:
                raise race(access, old, accesses, "of the host's pinned memory")

    def on_gpu(self, tensor: torch.Tensor, work: "Work", argument: str, writes: bool) -> None:
        """Work on the current stream of the tensor's GPU touches it; nothing for the CPU's."""
        gpu = gpu_of(tensor)
        if gpu is not None and gpu.machine is self.machine:
            work.touch(tensor, argument, writes, self.clock.current(gpu.index))

    def accesses_of(self, tensor: torch.Tensor) -> tuple[Accesses | None, str]:
        """Those to the tensor's storage, and where that is; None for memory of no bytes."""
        storage = _storage(tensor)
        allocation = storage._virtual_allocation
        if allocation is None or allocation.gpu is None:
            accesses = getattr(storage, ON_HOST, None)
            if accesses is None or accesses.of is not self:
                accesses = Accesses(self)
                setattr(storage, ON_HOST, accesses)
            return accesses, "of the host's pinned memory"
        block = allocation.block
        if block is None:
            return None, ""
        accesses = block.accesses
        if accesses is None or accesses.of is not self:  # allocated before the detector was on
            accesses = block.accesses = Accesses(self, stream=block.stream)
        return accesses, f"on {allocation.gpu.device}, at {block.address:#x}"

    # -- memory

    def allocated(self, gpu: GPU, block) -> None:
        """A block was handed out."""
        with self.lock:
            self._note_freed()
            accesses = block.accesses = Accesses(self, frames.here(), block.stream)
            memory = self._memory.get(gpu.index)
            if memory is not None:
                accesses.entries = memory.take(block.address, block.address + block.size)

    def freed(self, gpu: GPU, block) -> None:
        """A tensor goes. Streams by which it was recorded are waited for by the allocator."""
        accesses = block.accesses
        if accesses is not None and accesses.of is self and accesses.entries:
            recorded = frozenset(block.streams or ())
            self._freed.append((gpu.index, block.address, block.size, accesses, recorded, frames.here()))

    def given_back(self, index: int, first: int, size: int) -> None:
        """A segment went back to that GPU: cudaFree has waited for all its work."""
        with self.lock:
            self._note_freed()
            memory = self._memory.get(index)
            if memory is not None:
                memory.take(first, first + size)

    def _note_freed(self) -> None:
        while self._freed:
            gpu, address, size, accesses, recorded, where = self._freed.popleft()
            left = []
            for access in accesses.entries:
                own = access.queue.id == accesses.stream
                if (access.recorded or access.queue.id in recorded) and not own:
                    continue
                if not self.order.known_to_host(access.queue, access.number):
                    access.freed = access.freed or where
                    left.append(access)
            if left:
                self._memory.setdefault(gpu, FreedMemory()).put(address, address + size, left, self.order)

    # -- waiting: what `waits` reports

    def joined(self, queue: Queue, others: list[Queue]) -> None:
        """A stream waits for all that others have been given so far."""
        with self.lock:
            for other in others:
                if other is not queue:
                    self.order.wait(queue, self.order.state(other))

    def met(self, one: Queue, other: Queue) -> None:
        """A copy between two GPUs: each stream waits for the other."""
        with self.lock:
            self.order.meet(one, other)

    def recorded(self, event, queue: Queue) -> None:
        """An event stands for all that its stream has been given so far."""
        with self.lock:
            event._virtual_state = self.order.state(queue)

    def waited(self, event, queue: Queue) -> None:
        """A stream waits for an event."""
        with self.lock:
            self.order.wait(queue, getattr(event, "_virtual_state", {}))

    def event_done(self, event) -> None:
        """The host has waited for an event."""
        with self.lock:
            self.order.host_waits(getattr(event, "_virtual_state", {}))

    def stream_done(self, queue: Queue) -> None:
        """The host has waited for a stream."""
        with self.lock:
            self.order.host_waits(self.order.state(queue))

    seen_done = event_done  # by query()
    stream_seen_done = stream_done

    def device_done(self, gpu: int | None) -> None:
        """The host has waited for all streams of a GPU, or of all."""
        clock = self.clock
        with self.lock:
            for index in range(len(clock.queues)) if gpu is None else (gpu,):
                for queue in (*clock.queues[index].values(), *clock.collectives.streams[index]):
                    self.order.host_waits(self.order.state(queue))

    def made(self, queue: Queue) -> None:
        """A stream was made: it has waited for nothing."""

    # -- the backward pass

    def entered_node(self, queues: list[Queue]) -> None:
        """Autograd lets a node's streams wait for those of the nodes whose gradients it takes, and records its own for their memory.
        Here they wait for all of this backward pass so far."""
        passed = self._backward.__dict__.setdefault("queues", [])
        for queue in queues:
            self.joined(queue, passed)
        passed += [queue for queue in queues if queue not in passed]

    def left_backward(self, current: list[Queue]) -> None:
        """backward() returns: the caller's streams wait for those of the pass."""
        passed = self._backward.__dict__.pop("queues", [])
        for queue in current:
            self.joined(queue, [other for other in passed if other.gpu == queue.gpu])

    def keeps(self, queue: Queue) -> bool:
        """Is memory that this stream uses now kept until it is done? What NCCL works on, and gradients in a backward pass, are."""
        if queue.id >= COMMUNICATION:
            return True
        return _compat.graph_task() != -1 and queue in self._backward.__dict__.get("queues", ())


class Work:
    """One operation: on each stream that it comes to, one piece of work."""

    __slots__ = ("detector", "frames", "numbers", "operation")

    def __init__(self, detector: Detector, operation: str):
        self.detector, self.operation, self.frames = detector, operation, frames.here()
        self.numbers: dict[Queue, int] = {}

    def touch(self, tensor: torch.Tensor, argument: str, writes: bool, queue: Queue) -> None:
        """It reads this tensor on that stream, or writes to it. Raises UnsynchronizedAccessError."""
        detector = self.detector
        for part in sparse_parts(tensor) or (tensor,):
            if not part.numel() or _storage(part) is None:
                continue
            with detector.lock:
                accesses, where = detector.accesses_of(part)
                if accesses is None:
                    continue
                access = Access(part, self.operation, argument, writes, self.frames)
                access.queue, access.number = queue, self.numbers.get(queue, 0) or detector.order.next(queue)
                access.recorded = detector.keeps(queue)
                self.numbers[queue] = access.number
                with detector.machine.untracked():  # it may compare two views
                    old = accesses.conflict(access, detector.order)
                if old is not None:
                    raise race(access, old, accesses, where)
                accesses.add(access, detector.order)


def _storage(tensor: torch.Tensor):
    """None where it has none of its own (wrappers)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
