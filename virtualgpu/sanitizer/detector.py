"""The detector: it is told what streams and the host do, in the order of the program, and raises at the first race."""

import contextlib
import copy
import linecache
import math
import os
import sys
import sysconfig
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from pathlib import Path
from types import CodeType, FrameType

import torch

from virtualgpu import _compat, environment
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import gpu_of, reach, sparse_parts
from virtualgpu.memory.blocks import format_size
from virtualgpu.memory.snapshot import line_of
from virtualgpu.timing.nccl import COMMUNICATION
from virtualgpu.timing.streams import DEFAULT, Queue

# -- Lines of the program, as far as they are the user's: not PyTorch's, not Python's own, not virtualgpu's.

Frames = tuple[tuple[CodeType, int], ...]  # code and instruction, innermost first

SHOWN = 2
DEEPEST = 8  # frames that are kept
_OURS = tuple(str(Path(path)) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))
_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_kinds: dict[str, int] = {}  # by file: 0 the user's, 1 an installed package's, 2 nobody's concern


def here() -> Frames:
    """Where the program is now."""
    frames: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < DEEPEST:
        if _kind(frame.f_code.co_filename) < 2:
            frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def lines(frames: Frames) -> list[str]:
    """`train.py:12, in step: y = x * 2` of each, the innermost first. Packages that are installed only where nothing else is."""
    of_user = [frame for frame in frames if _kind(frame[0].co_filename) == 0] or list(frames)
    result = []
    for code, instruction in of_user[:SHOWN]:
        line = line_of(code, instruction)
        text = linecache.getline(code.co_filename, line).strip()
        result.append(f"{_short(code.co_filename)}:{line}, in {code.co_name}{f': {text}' if text else ''}")
    return result


def _kind(file: str) -> int:
    kind = _kinds.get(file)
    if kind is None:
        if file.startswith(_OURS) or file.startswith("<frozen"):
            kind = 2
        elif file.startswith(_INSTALLED):
            kind = 1
        else:
            kind = 2 if file.startswith(_PYTHON) else 0
        _kinds[file] = kind
    return kind


def _short(file: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        inside = os.path.relpath(file)
        if not inside.startswith(os.pardir) and os.path.exists(inside):
            return inside
    return file


# -- Who has waited for whom: what of each stream's work is surely done before the next work of another stream, or of the host.
#
# Vector clocks: every work of a stream has a number, from 1, and each stream knows up to which number of every other stream it has
# waited. Simulated time decides nothing here: what happened to be done early enough is still a race.


State = dict[Queue, int]  # of each stream: up to this number its work is done
HOST = Queue(-1, -1)  # All threads are one host here: who waited in one may tell the others in ways that are not seen


class Order:
    """Of one process."""

    def __init__(self):
        self._count: State = {}
        self._seen: dict[Queue, State] = {HOST: {}}

    def next(self, queue: Queue) -> int:
        """The number of new work on that stream."""
        number = self._count[queue] = self._count.get(queue, 0) + 1
        return number

    def state(self, queue: Queue) -> State:
        """What is done when the stream has come to here: its own work, and all that it has waited for."""
        return {**self._seen.get(queue, {}), queue: self._count.get(queue, 0)}

    def wait(self, queue: Queue, state: State) -> None:
        """What comes on that stream from now on comes after that state; of the HOST, all that it launches from now on."""
        seen = self._seen.setdefault(queue, {})
        for other, number in state.items():
            seen[other] = max(number, seen.get(other, 0))

    def is_done(self, queue: Queue, number: int, here: Queue = HOST) -> bool:
        """Is this work of stream `queue` done before the next work of stream `here`; by default, as far as the host can know?"""
        return queue is here or any(number <= self._seen.get(one, {}).get(queue, 0) for one in (HOST, here))


# -- Who used a piece of memory: each access with its stream, its bytes, and the line of the program.


KEPT = 512  # accesses that one storage remembers; of more, the oldest are forgotten
LARGEST = 1 << 28  # elements that are compared one by one, where two views are interleaved


class Access:
    """One operation's use of a tensor.

    queue, number: the stream, and the number of its work (see Order). start, end: bytes from the beginning of the
    storage. view: (offset, shape, stride, itemsize) where not all bytes between them are touched, else None. recorded: the memory is
    not free before it is done, whoever frees it. freed: the program's frames where the tensor was freed.
    """

    def __init__(self, tensor: torch.Tensor, operation: str, argument: str, writes: bool, frames: Frames):
        self.operation, self.argument, self.writes, self.frames = operation, argument, writes, frames
        self.queue, self.number, self.recorded = HOST, 0, False
        self.freed: Frames | None = None
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        offset, stride, size = tensor.storage_offset(), tensor.stride(), tensor.element_size()
        elements = reach(tensor)
        self.start, self.end = offset * size, (offset + elements) * size
        self.view = None if elements == tensor.numel() else (offset, self.shape, stride, size)

    def inside(self, start: int, end: int, shift: int) -> "Access":
        """The part of it between two addresses, as of memory that begins `shift` later."""
        part = copy.copy(self)
        part.start, part.end, part.view = max(self.start, start) + shift, min(self.end, end) + shift, None
        return part

    def covers(self, other: "Access") -> bool:
        """Does it touch all that the other one does?"""
        if self.view is not None:
            return self.view == other.view
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: "Access") -> bool:
        """Do they touch one byte in common?"""
        if self.end <= other.start or other.end <= self.start:
            return False
        return (self.view is None and other.view is None) or _interleaved_meet(self, other)


class Accesses:
    """Of one storage: those that later ones may still collide with. frames: of its allocation. stream: the id of the stream it was
    allocated on."""

    def __init__(self, of, frames: Frames | None = None, stream: int | None = None):
        self.of, self.frames, self.stream = of, frames, stream
        self.entries: list[Access] = []

    def conflict(self, new: Access, order: Order) -> Access | None:
        """An earlier access that may not be done when the new one happens; one of them writes."""
        for old in self.entries:
            if (old.writes or new.writes) and not order.is_done(old.queue, old.number, new.queue) and old.meets(new):
                return old
        return None

    def add(self, new: Access, order: Order) -> None:
        """Remember it. Who collides with one that it stands for will collide with it, too: those are forgotten."""
        self.entries = [
            old
            for old in self.entries
            if not ((new.writes or (not old.writes and old.queue is new.queue)) and new.covers(old))
        ]
        self.entries.append(new)
        if len(self.entries) > KEPT:
            self.entries = [old for old in self.entries if not order.is_done(old.queue, old.number)][-KEPT // 2 :]


def _interleaved_meet(one: Access, other: Access) -> bool:
    """As Access.meets, element by element. Too large a pair is taken not to meet."""
    views = [access.view or (access.start, (access.end - access.start,), (1,), 1) for access in (one, other)]
    unit = math.gcd(*(size for *_, size in views))
    first = min(one.start, other.start) // unit
    reach = -(-max(one.end, other.end) // unit) - first
    if reach > LARGEST:
        return False
    touched = torch.zeros(reach, dtype=torch.bool, device="cpu")
    parts = []
    for offset, shape, stride, size in views:
        wide = size // unit
        parts.append(touched.as_strided((*shape, wide), (*(step * wide for step in stride), 1), offset * wide - first))
    parts[0].fill_(True)
    return bool(parts[1].any())


# -- Memory that was freed, and who may still use it: what the next tensor there has to wait for.


KEPT_FREED = 4096  # pieces; of more, those that the host knows to be done are forgotten


class FreedMemory:
    """Of one GPU: pieces that do not overlap, by address, each with the accesses to what lay there. Addresses in bytes."""

    def __init__(self):
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, list[Access]]] = []

    def put(self, start: int, end: int, accesses: list[Access], order: Order) -> None:
        """A tensor at those addresses was freed; its accesses count bytes from there."""
        self.take(start, end)
        index = bisect_left(self._starts, start)
        moved = [access.inside(0, end - start, start) for access in accesses]
        self._starts.insert(index, start)
        self._pieces.insert(index, (start, end, moved))
        if len(self._pieces) > KEPT_FREED:
            self._pieces = [
                piece
                for piece in self._pieces
                if not all(order.is_done(access.queue, access.number) for access in piece[2])
            ][-KEPT_FREED // 2 :]
            self._starts = [piece[0] for piece in self._pieces]

    def take(self, start: int, end: int) -> list[Access]:
        """A tensor begins to live there: the accesses to what lay there before, in bytes from its start."""
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._pieces) and self._pieces[first][1] <= start:
            first += 1
        last = bisect_left(self._starts, end, first)
        taken, left = self._pieces[first:last], []
        for low, high, accesses in taken:
            left += [(a, b, accesses) for a, b in ((low, start), (end, high)) if a < b]
        self._pieces[first:last] = left
        self._starts[first:last] = [piece[0] for piece in left]
        inside = [access for _, _, accesses in taken for access in accesses]
        return [access.inside(start, end, -start) for access in inside if access.start < end and start < access.end]


# -- What a race is called: one error that names both accesses, the tensor, the streams, the lines, and the cure.


class UnsynchronizedAccessError(RuntimeError):
    """Two accesses to one piece of memory, one of which writes, and nothing makes the later one wait for the earlier.

    It has the name of PyTorch's own (`torch.cuda._sanitizer`), and is a RuntimeError.
    """

    __module__ = "virtualgpu.sanitizer"


def race(new: Access, old: Access, memory: Accesses, where: str) -> UnsynchronizedAccessError:
    """The error. where: the device, and the address."""
    doing = "writing" if old.writes else "reading"
    does = "overwrites" if new.writes else "reads"
    gone = "" if old.freed is None else ", of a tensor that was freed"
    text = [
        f"{_rank()}a race: {_by(new)} {does} what {_by(old)} may still be {doing}{gone}",
        *_part("tensor", f"{_dtype(new)} of shape {new.shape}, {format_size(new.end - new.start)} {where}", None),
        *(_part("made", "", memory.frames) if memory.frames else ()),
        *_part("now", _use(new, "it"), new.frames),
        *_part("before", _use(old, "it" if old.freed is None else f"the tensor of shape {old.shape}"), old.frames),
        *(_part("freed", "", old.freed) if old.freed else ()),
        *_part("cure", _cure(new, old, memory), None),
    ]
    return UnsynchronizedAccessError("\n".join(text))


def _part(name: str, text: str, where: Frames | None) -> list[str]:
    rows = [text] if text else []
    rows += [("  " if text else "") + line for line in lines(where or ())]
    return [f"  {name if not index else '':8}{line}" for index, line in enumerate(rows)]


def _by(access: Access) -> str:
    return f"the host ({access.operation})" if access.queue is HOST else f"{access.operation} on {stream(access.queue)}"


def _use(access: Access, what: str) -> str:
    verb = "writes" if access.writes else "reads"
    argument = f" (its argument {access.argument!r})" if access.argument not in ("", "out") else ""
    return f"{_by(access)} {verb} {what}{argument}"


def stream(queue: Queue) -> str:
    """How a stream is called: by its stream_id."""
    if queue.id == DEFAULT:
        return f"the default stream of cuda:{queue.gpu}"
    if queue.id >= COMMUNICATION:
        return f"a stream of communication of cuda:{queue.gpu}"
    return f"stream {queue.id} of cuda:{queue.gpu}"


def _cure(new: Access, old: Access, memory: Accesses) -> str:
    if old.queue.id >= COMMUNICATION:
        return f"call wait() on the work that {old.operation} returned, before this line"
    if new.queue is HOST:
        return (
            f"let the host wait before this line: synchronize() of {stream(old.queue)}, or of an event recorded there behind that work; "
            "torch.cuda.synchronize() waits for all"
        )
    if old.freed is not None and old.queue.id != memory.stream:
        return (
            f"call tensor.record_stream(stream) for {stream(old.queue)} on the tensor that is freed, or free it when the stream that it "
            "was made on has waited for that one"
        )
    waiting = "the current stream" if new.queue.id >= COMMUNICATION else stream(new.queue)
    return (
        f"let {waiting} wait for {stream(old.queue)} before this line: stream.wait_stream(other), or wait_event() of an event recorded behind "
        "that work"
    )


def _dtype(access: Access) -> str:
    return str(access.dtype).removeprefix("torch.")


def _rank() -> str:
    rank = environment.rank()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    return f"rank {rank}: " if rank >= 0 else ""


# -- The detector: it is told what streams and the host do, in the order of the program, and raises at the first race.
#
# An access is checked against those to the same bytes before it, of which one of the two writes: has its stream waited for the other's
# (`Order`)? The bytes are those of a storage; when it is freed, what others may still do with them goes on to the next tensor there
# (`FreedMemory`). Of memory on the host only pinned storages are watched, while copies in the background use them.


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
            access = Access(tensor, operation, argument, writes, here())
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
            accesses = block.accesses = Accesses(self, here(), block.stream)
            memory = self._memory.get(gpu.index)
            if memory is not None:
                accesses.entries = memory.take(block.address, block.address + block.size)

    def freed(self, gpu: GPU, block) -> None:
        """A tensor goes. Streams by which it was recorded are waited for by the allocator."""
        accesses = block.accesses
        if accesses is not None and accesses.of is self and accesses.entries:
            recorded = frozenset(block.streams or ())
            self._freed.append((gpu.index, block.address, block.size, accesses, recorded, here()))

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
                same_stream = access.queue.id == accesses.stream
                if (access.recorded or access.queue.id in recorded) and not same_stream:
                    continue
                if not self.order.is_done(access.queue, access.number):
                    access.freed = access.freed or where
                    left.append(access)
            if left:
                self._memory.setdefault(gpu, FreedMemory()).put(address, address + size, left, self.order)

    # -- waiting: what `hooks` report

    def joined(self, queue: Queue, others: list[Queue]) -> None:
        """A stream waits for all that others have been given so far."""
        with self.lock:
            for other in others:
                if other is not queue:
                    self.order.wait(queue, self.order.state(other))

    def met(self, one: Queue, other: Queue) -> None:
        """A copy between two GPUs: each stream waits for the other."""
        with self.lock:
            states = self.order.state(one), self.order.state(other)
            self.order.wait(one, states[1])
            self.order.wait(other, states[0])

    def recorded(self, event, queue: Queue) -> None:
        """An event stands for all that its stream has been given so far."""
        with self.lock:
            event._virtual_state = self.order.state(queue)

    def waited(self, event, queue: Queue) -> None:
        """A stream waits for an event."""
        with self.lock:
            self.order.wait(queue, getattr(event, "_virtual_state", {}))

    def event_done(self, event) -> None:
        """The host has waited for an event, or query() has seen it done."""
        with self.lock:
            self.order.wait(HOST, getattr(event, "_virtual_state", {}))

    def stream_done(self, queue: Queue) -> None:
        """The host has waited for a stream, or query() has seen it done."""
        with self.lock:
            self.order.wait(HOST, self.order.state(queue))

    def device_done(self, gpu: int | None) -> None:
        """The host has waited for all streams of a GPU, or of all."""
        clock = self.clock
        with self.lock:
            for index in range(len(clock.queues)) if gpu is None else (gpu,):
                for queue in (*clock.queues[index].values(), *clock.collectives.streams[index]):
                    self.order.wait(HOST, self.order.state(queue))

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
        self.detector, self.operation, self.frames = detector, operation, here()
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
