"""Which messages every rank of a group has come to; and those that wait for each other: who stands where, and what would help."""

import functools
import operator
import os
import struct
from collections.abc import Sequence
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
    """One side of a message. peer: the other rank. nth: among those to, or from, that peer in that direction, from 0."""

    direction: int
    peer: int
    nbytes: int
    nth: int


class Awaited(NamedTuple):
    """A message that somebody waits for `rank` to come to: its side, as `MessageLog` counts them."""

    rank: int
    direction: int
    peer: int
    nth: int

    def as_word(self) -> int:
        """One whole number, not 0, that `of_word` reads."""
        return ((self.nth << 16 | self.rank) << 16 | self.peer) << 2 | self.direction << 1 | 1

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
        self.where: dict[tuple[int, int, int, int], int] = {}  # the batch that a message is in, by `Awaited`
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
        return self.where[awaited]

    def has(self, message: "Awaited") -> bool:
        """Has its rank come to it?"""
        if message not in self.where and message.rank != self.rank:
            self._read(message.rank)
        return message in self.where

    def nbytes(self, rank: int, direction: int, peer: int, index: int) -> int:
        """Of one message that `rank` is known to have come to."""
        return self._sizes[rank, direction, peer][index]

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
        goes_on = any(self.has(awaited) for _, awaited in waits)  # one of them is about to
        return None if goes_on or any(self.arrivals.waits(rank) != awaits[rank] for rank in circle) else waits

    def _take(self, rank: int, issued: float, after: int, messages: list[tuple[int, int, int]], stream: int) -> None:
        """A rank's next batch, of (direction, peer, nbytes)."""
        batch = Batch(issued, after, [], stream)
        for direction, peer, nbytes in messages:
            sizes = self._sizes.setdefault((rank, direction, peer), [])
            index = len(sizes)
            sizes.append(nbytes)
            self.where[rank, direction, peer, index] = len(self.batches[rank])
            batch.messages.append(Message(direction, peer, nbytes, index))
        self.batches[rank].append(batch)

    def _read(self, rank: int) -> None:
        """Take in what a rank has written since."""
        file = self.arrivals.file
        while file is not None:
            head = os.pread(file, MESSAGE.size, self._offsets[rank])
            nbytes = MESSAGE.unpack(head)[1] * MESSAGE.size if len(head) == MESSAGE.size else 0
            data = os.pread(file, nbytes, self._offsets[rank]) if 0 < nbytes <= ROOM else b""
            records = list(MESSAGE.iter_unpack(data)) if data and len(data) == nbytes else []
            if not records or any(_check(record[:-1]) != record[-1] for record in records):
                return  # nothing yet, or what is being written
            _, _, bits, after, way, *_ = records[0]
            messages = [(record[4] & 1, record[5], record[6]) for record in records]
            self._take(rank, float_of_bits(bits), after, messages, way >> 1)
            self._offsets[rank] += nbytes


def _check(head: tuple[int, ...]) -> int:
    return functools.reduce(operator.xor, head, WRITTEN)


# -- Messages that wait for each other: who stands where, by what each rank called, and what would help.


def describe(hang: Hang, log: MessageLog, ranks: Sequence[int], layout: Layout) -> str:
    """Who waits for whom, why NCCL would hang there, and the cure. ranks: the global rank of each member."""
    if hang.circle:  # hosts wait, each until another one has come to the other side of a message: most often of its own
        stuck = [Awaited(one.peer, 1 - one.direction, one.rank, one.nth) for _, one in hang.circle]
    else:  # batches on streams do, each behind one that waits for the other rank
        stuck = []
        for (rank, number), (other, before) in zip(hang.path, hang.path[1:], strict=False):
            if rank == other and log.batches[rank][number].after == before:
                message = log.batches[rank][before].messages[0]
                stuck.append(Awaited(rank, message.direction, message.peer, message.nth))
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
    streams, calls = [log.batches[one.rank][log.where[one]].stream for one in stuck], []
    for one, stream in zip(stuck, streams, strict=True):
        what = f"sends {log.nbytes(*one):,} bytes to" if one.direction == SEND else "receives from"
        on = f" on stream {stream}" if stream != DEFAULT else ""
        calls.append(f"rank {ranks[one.rank]} {what} rank {ranks[one.peer]}{on}")
    reason = "; ".join(dict.fromkeys(_reason(one, log.nbytes(*one), layout) for one in sends))
    beside = any(stream != DEFAULT for stream in streams) and len(members) > 2
    apart = " (on streams that do not wait for each other a GPU may go on: here the host waits)" if beside else ""
    return f"{who} {does}, and NCCL would hang{apart}: {', '.join(calls)}{'; ' * bool(reason)}{reason}. {cure}"


def _reason(one: Awaited, nbytes: int, layout: Layout) -> str:
    room = STEPS * layout.step(one.rank, one.peer)
    if nbytes > room:
        return f"a message of more than {room >> 20} MiB leaves its sender when the receiver has come to it"
    if one.nth == 0:
        return "the first message of a direction connects its sender with its receiver, and returns when both have come to it"
    return f"NCCL's buffer has room for {STEPS} small messages that nobody has received"
