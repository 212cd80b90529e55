"""Which messages every rank of a group has come to; and those that wait for each other: who stands where, and what would help."""

import functools
import operator
import os
import struct
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

from virtualgpu.distributed.shared_clock import (
    ROOM,
    Arrivals,
    RankLate,
    float_bits,
    float_of_bits,
    real_sleep,
    real_time,
)
from virtualgpu.distributed.topology import Layout
from virtualgpu.hardware.machine import STEPS
from virtualgpu.timing.streams import DEFAULT

# -- Which messages every rank of a group has come to, in order: each rank writes its own in a file that all of them have open.
#
# It is the file of the group's page of arrival times, far behind the page, so that it has no name any more when the first message comes, and
# what a rank has written can be read when its group is destroyed, or when it has ended.
#
# From these records any rank works out when any message begins and ends, without asking: nobody waits for another process to find
# time for an answer, and all come to the same numbers.


# number of the batch, its messages, moment, batch before, direction (and stream), peer, bytes, and a check of these
MESSAGE = struct.Struct("8q")
WRITTEN = 1 << 40  # in every check, so that nothing is not a record
SEND, RECV = 0, 1


class Message(NamedTuple):
    """One side of a message. peer: the other rank. index: among those to, or from, that peer in that direction, from 0."""

    direction: int
    peer: int
    nbytes: int
    index: int


class Awaited(NamedTuple):
    """A message that somebody waits for `rank` to come to: its side, as `MessageLog` counts them."""

    rank: int
    direction: int
    peer: int
    index: int

    def as_word(self) -> int:
        """One whole number, not 0, that `of_word` reads."""
        return ((self.index << 16 | self.rank) << 16 | self.peer) << 2 | self.direction << 1 | 1

    @classmethod
    def of_word(cls, word: int) -> "Awaited":
        """The reverse of `as_word`."""
        return cls(word >> 18 & 0xFFFF, word >> 1 & 1, word >> 2 & 0xFFFF, word >> 34)


class Hang(RuntimeError):
    """Messages that wait for each other. circle: of each rank (within the group) whose host waits, what it waits for; path: where all
    messages are known, the batches (rank, number) that do."""

    def __init__(self, circle: Sequence[tuple[int, Awaited]] = (), path: Sequence[tuple[int, int]] = ()):
        super().__init__("ranks wait for each other")
        self.circle, self.path = circle, path


class Batch(NamedTuple):
    """Messages that one rank came to together. issued: when; after: the batch of this rank that must end before, or -1; stream: the id
    of that which was current."""

    issued: float
    after: int
    messages: list[Message]
    stream: int


class MessageLog:
    """The batches of all ranks of a group, as far as they were read. Ranks count within the group."""

    def __init__(self, arrivals: Arrivals):
        self.arrivals, self.rank, self.size = arrivals, arrivals.rank, arrivals.size
        self.batches: list[list[Batch]] = [[] for _ in range(arrivals.size)]
        self._offsets = [arrivals.nbytes + rank * ROOM for rank in range(arrivals.size)]  # how far read, or written
        self._where: dict[Awaited | tuple[int, int, int, int], int] = {}  # the batch that a message is in
        self._sizes: dict[tuple[int, int, int], list[int]] = {}  # (rank, direction, peer): the bytes of each message

    def write(self, issued: float, after: int, messages: list[tuple[int, int, int]], stream: int = 0) -> int:
        """This rank comes to a batch of (direction, peer, nbytes), called on that stream; returns its number."""
        number, bits = len(self.batches[self.rank]), float_bits(issued)
        self._take(self.rank, issued, after, messages, stream)
        if self.arrivals.file is not None:
            heads = [(number, len(messages), bits, after, stream << 1 | way, *rest) for way, *rest in messages]
            data = b"".join(MESSAGE.pack(*head, _check(head)) for head in heads)
            self._offsets[self.rank] += os.pwrite(self.arrivals.file, data, self._offsets[self.rank])
        return number

    def batch_of(self, rank: int, direction: int, peer: int, index: int, deadline: float, timeout: timedelta) -> int:
        """The number of the batch in which `rank` has that message. Waits until it has come to it; raises RankEnded, RankLate, or Hang."""
        awaited, pause = Awaited(rank, direction, peer, index), 1e-5
        try:
            while not self.has(awaited):
                if real_time() > deadline:
                    raise RankLate([rank], timeout.total_seconds())
                if pause < 1e-3:
                    pause = min(1e-3, 1.5 * pause)
                elif (circle := self._circle(awaited)) is not None:
                    raise Hang(circle)
                elif rank in self.arrivals.ended() and not self.has(awaited):
                    raise self.arrivals.gone(rank)
                real_sleep(pause)
        except Hang:
            raise  # its word stays: the others of the circle find the same
        except BaseException:
            self.arrivals.wait_for(0)
            raise
        self.arrivals.wait_for(0)
        return self._where[awaited]

    def has(self, message: "Awaited") -> bool:
        """Has its rank come to it?"""
        return message in self._where or (
            message.rank != self.rank and self._read(message.rank) and message in self._where
        )

    def nbytes(self, rank: int, direction: int, peer: int, index: int) -> int:
        """Of one message that `rank` is known to have come to."""
        return self._sizes[rank, direction, peer][index]

    def batch_with(self, rank: int, direction: int, peer: int, index: int) -> int:
        """The number of the batch in which `rank` is known to have that message."""
        return self._where[rank, direction, peer, index]

    def _circle(self, awaited: "Awaited") -> list[tuple[int, "Awaited"]] | None:
        """Ranks that wait for each other, and for what each, where this one waits for that. None where that is not so, or not yet written
        down."""
        self.arrivals.wait_for(awaited.as_word())
        awaits: dict[int, int] = {}
        rank = self.rank
        while rank not in awaits:
            awaits[rank] = self.arrivals.waits(rank)
            if not awaits[rank]:
                return None
            rank = Awaited.of_word(awaits[rank]).rank
        circle = list(awaits)[list(awaits).index(rank) :]
        waits = [(member, Awaited.of_word(awaits[member])) for member in circle]
        if any(self.has(awaited) for _, awaited in waits) or any(
            self.arrivals.waits(member) != awaits[member] for member in circle
        ):
            return None  # one of them is about to go on
        return waits

    def _take(
        self, rank: int, issued: float, after: int, messages: Iterable[tuple[int, int, int]], stream: int
    ) -> None:
        """A rank's next batch, of (direction, peer, nbytes)."""
        batch = Batch(issued, after, [], stream)
        for direction, peer, nbytes in messages:
            sizes = self._sizes.setdefault((rank, direction, peer), [])
            index = len(sizes)
            sizes.append(nbytes)
            self._where[rank, direction, peer, index] = len(self.batches[rank])
            batch.messages.append(Message(direction, peer, nbytes, index))
        self.batches[rank].append(batch)

    def _read(self, rank: int) -> bool:
        """Take in what a rank has written since; False where that is nothing."""
        if self.arrivals.file is None:
            return False
        begin = self._offsets[rank]
        while (batch := self._next_batch(rank)) is not None:
            _, _, bits, after, way, *_ = batch[0]
            messages = [(record[4] & 1, *record[5:7]) for record in batch]
            self._take(rank, float_of_bits(bits), after, messages, way >> 1)
            self._offsets[rank] += len(batch) * MESSAGE.size
        return self._offsets[rank] > begin

    def _next_batch(self, rank: int) -> list[tuple[int, ...]] | None:
        """Its records; None for nothing yet, or what is being written."""
        head = os.pread(self.arrivals.file, MESSAGE.size, self._offsets[rank])
        if len(head) < MESSAGE.size:
            return None
        nbytes = MESSAGE.unpack(head)[1] * MESSAGE.size
        data = os.pread(self.arrivals.file, nbytes, self._offsets[rank]) if 0 < nbytes <= ROOM else b""
        records = list(MESSAGE.iter_unpack(data)) if data and len(data) == nbytes else []
        return records if records and all(_check(record[:-1]) == record[-1] for record in records) else None


def _check(head: tuple[int, ...]) -> int:
    return functools.reduce(operator.xor, head, WRITTEN)


# -- Messages that wait for each other: who stands where, by what each rank called, and what would help.


class Stuck(NamedTuple):
    """A message at which a rank stands. Ranks count within the group; index as in `Message`; stream: that it was called on."""

    rank: int
    direction: int
    peer: int
    index: int
    nbytes: int
    stream: int


def describe(hang: Hang, log: MessageLog, ranks: Sequence[int], layout: Layout) -> str:
    """Who waits for whom, why NCCL would hang there, and the cure. ranks: the global rank of each member."""
    stuck = _called(hang, log) if hang.circle else _carried(hang, log)
    first = stuck.index(min(stuck))
    stuck = stuck[first:] + stuck[:first]  # whoever tells it
    members = sorted({ranks[one.rank] for one in stuck})
    who = "both ranks" if len(members) == 2 else f"ranks {', '.join(map(str, members))}"
    sends = [one for one in stuck if one.direction == SEND]
    if not sends:
        does, cure = "receive first", "Let one of them send first, or use batch_isend_irecv"
    elif len(sends) == len(stuck):
        does, cure = "send first", "Use batch_isend_irecv, or let one of them receive first"
    else:
        does, cure = "wait for each other", "Use batch_isend_irecv, or call both sides of each message in one order"
    calls = ", ".join(_call(one, ranks) for one in stuck)
    reason = "; ".join(dict.fromkeys(_reason(one, layout) for one in sends))
    beside = any(one.stream != DEFAULT for one in stuck) and len(members) > 2
    apart = " (on streams that do not wait for each other a GPU may go on: here the host waits)" if beside else ""
    return f"{who} {does}, and NCCL would hang{apart}: {calls}{'; ' * bool(reason)}{reason}. {cure}"


def _called(hang: Hang, log: MessageLog) -> list[Stuck]:
    """Of ranks whose hosts wait, each until another one has come to the other side of a message: most often of its own."""
    return [_stuck(log, awaited.peer, 1 - awaited.direction, awaited.rank, awaited.index) for _, awaited in hang.circle]


def _carried(hang: Hang, log: MessageLog) -> list[Stuck]:
    """Of batches on streams, each behind one that waits for the other rank."""
    stuck = []
    for (rank, number), (other, before) in zip(hang.path, hang.path[1:], strict=False):
        if rank == other and log.batches[rank][number].after == before:
            message = log.batches[rank][before].messages[0]
            stuck.append(_stuck(log, rank, message.direction, message.peer, message.index))
    return stuck


def _stuck(log: MessageLog, rank: int, direction: int, peer: int, index: int) -> Stuck:
    batch = log.batches[rank][log.batch_with(rank, direction, peer, index)]
    return Stuck(rank, direction, peer, index, log.nbytes(rank, direction, peer, index), batch.stream)


def _call(one: Stuck, ranks: Sequence[int]) -> str:
    what = f"sends {one.nbytes:,} bytes to" if one.direction == SEND else "receives from"
    on = f" on stream {one.stream}" if one.stream != DEFAULT else ""
    return f"rank {ranks[one.rank]} {what} rank {ranks[one.peer]}{on}"


def _reason(one: Stuck, layout: Layout) -> str:
    room = STEPS * layout.step(one.rank, one.peer)
    if one.nbytes > room:
        return f"a message of more than {room >> 20} MiB leaves its sender when the receiver has come to it"
    if one.index == 0:
        return "the first message of a direction connects its sender with its receiver, and returns when both have come to it"
    return f"NCCL's buffer has room for {STEPS} small messages that nobody has received"
