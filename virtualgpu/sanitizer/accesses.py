"""Who used a piece of memory: each access with its stream, its bytes, and the line of the program."""

import math

import torch

from virtualgpu.engine.allocation import reach
from virtualgpu.sanitizer.frames import Frames
from virtualgpu.sanitizer.order import Order
from virtualgpu.timing.streams import Queue

KEPT = 512  # accesses that one storage remembers; of more, the oldest are forgotten
LARGEST = 1 << 28  # elements that are compared one by one, where two views are interleaved


class Access:
    """One operation's use of a tensor.

    queue, number: the stream, and the number of its work (see Order); None for the host. start, end: bytes from the beginning of the
    storage. view: (offset, shape, stride, itemsize) where not all bytes between them are touched, else None. recorded: the memory is
    not free before it is done, whoever frees it. freed: the program's frames where the tensor was freed.
    """

    __slots__ = (
        "argument",
        "dtype",
        "end",
        "frames",
        "freed",
        "number",
        "operation",
        "queue",
        "recorded",
        "shape",
        "start",
        "view",
        "writes",
    )

    def __init__(self, tensor: torch.Tensor, operation: str, argument: str, writes: bool, frames: Frames):
        self.operation, self.argument, self.writes, self.frames = operation, argument, writes, frames
        self.queue: Queue | None = None
        self.number, self.recorded, self.freed = 0, False, None
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        offset, stride, size = tensor.storage_offset(), tensor.stride(), tensor.element_size()
        elements = reach(tensor)
        self.start, self.end = offset * size, (offset + elements) * size
        self.view = None if elements == tensor.numel() else (offset, self.shape, stride, size)

    def inside(self, start: int, end: int, shift: int) -> "Access":
        """The part of it between two addresses, as of memory that begins `shift` later."""
        part = object.__new__(Access)
        for name in self.__slots__:
            setattr(part, name, getattr(self, name))
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

    __slots__ = ("entries", "frames", "of", "stream")

    def __init__(self, of, frames: Frames | None = None, stream: int | None = None):
        self.of, self.frames, self.stream = of, frames, stream
        self.entries: list[Access] = []

    def conflict(self, new: Access, order: Order) -> Access | None:
        """An earlier access that may not be done when the new one happens; one of them writes."""
        for old in self.entries:
            if (old.writes or new.writes) and old.queue is not new.queue:
                if new.queue is None:
                    done = order.known_to_host(old.queue, old.number)
                else:
                    done = order.is_done(old.queue, old.number, new.queue)
                if not done and old.meets(new):
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
            self.entries = [old for old in self.entries if not order.known_to_host(old.queue, old.number)][-KEPT // 2 :]


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
