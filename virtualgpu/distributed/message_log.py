"""Which messages every rank of a group has come to, in order: each rank writes its own in a file that all of them have open.

It is the file of the group's page of moments, far behind the page, so that it has no name any more when the first message comes, and
what a rank has written can be read when its group is destroyed, or when it has ended.

From these records any rank works out when any message begins and ends, without asking: nobody waits for another process to find
time for an answer, and all come to the same numbers.
"""

import functools
import operator
import os
import struct
import time
from datetime import timedelta
from typing import NamedTuple

from virtualgpu.distributed.arrivals import Arrivals, RankEnded, RankLate, float_bits, float_of_bits

RECORD = struct.Struct(
    "8q"
)  # number of the batch, its messages, moment, batch before, way, peer, bytes, and a check of these
ROOM = 1 << 34  # bytes for each rank: 268 million messages. What nobody wrote takes no room on the disk
READ = 1 << 12
WRITTEN = 1 << 40  # in every check, so that nothing is not a record
SEND, RECV = 0, 1


class Message(NamedTuple):
    """One side of a message. peer: the other rank. nth: among those to, or from, that peer in that direction, from 0."""

    way: int
    peer: int
    nbytes: int
    index: int


class Batch(NamedTuple):
    """Messages that one rank came to together. issued: when; after: the batch of this rank that must end before, or -1."""

    issued: float
    after: int
    messages: list[Message]


class MessageLog:
    """The batches of all ranks of a group, as far as they were read. Ranks count within the group."""

    def __init__(self, arrivals: Arrivals):
        self.arrivals, self.rank, self.size = arrivals, arrivals.rank, arrivals.size
        self._at = [arrivals.nbytes + rank * ROOM for rank in range(arrivals.size)]  # how far each was read, or written
        self.batches: list[list[Batch]] = [[] for _ in range(arrivals.size)]
        self.where: dict[tuple[int, int, int, int], int] = {}  # (rank, way, peer, nth): the batch that it is in
        self._counts: dict[tuple[int, int, int], int] = {}

    def write(self, issued: float, after: int, messages: list[tuple[int, int, int]]) -> int:
        """This rank comes to a batch of (way, peer, nbytes); returns its number."""
        number, bits = len(self._mine), float_bits(issued)
        written = []
        for way, peer, nbytes in messages:
            index = self._next(self.rank, way, peer)
            written.append(Message(way, peer, nbytes, index))
            self.where[self.rank, way, peer, index] = number
        self._mine.append(Batch(issued, after, written))
        if self.arrivals.file is not None:
            heads = [(number, len(written), bits, after, m.way, m.peer, m.nbytes) for m in written]
            data = b"".join(RECORD.pack(*head, _check(head)) for head in heads)
            self._at[self.rank] += os.pwrite(self.arrivals.file, data, self._at[self.rank])
        return number

    def batch_of(self, rank: int, way: int, peer: int, index: int, deadline: float, timeout: timedelta) -> int:
        """The number of the batch in which `rank` has that message. Waits until it has come to it; raises RankEnded or RankLate."""
        pause = 1e-5
        while (rank, way, peer, index) not in self.where:
            if rank == self.rank or not self._read(rank):
                if time.monotonic() > deadline:
                    raise RankLate([rank], timeout.total_seconds())
                time.sleep(pause)
                pause = min(1e-3, 1.5 * pause)
                if pause == 1e-3 and rank in self.arrivals.ended() and not self._read(rank):
                    raise RankEnded(rank, alive=self.arrivals.left(rank))
        return self.where[rank, way, peer, index]

    @property
    def _mine(self) -> list[Batch]:
        return self.batches[self.rank]

    def _next(self, rank: int, way: int, peer: int) -> int:
        count = self._counts.get((rank, way, peer), 0)
        self._counts[rank, way, peer] = count + 1
        return count

    def _read(self, rank: int) -> bool:
        """Take in what a rank has written since; False where that is nothing."""
        if self.arrivals.file is None:
            return False
        data = os.pread(self.arrivals.file, READ, self._at[rank])
        at, found = 0, False
        while at + RECORD.size <= len(data):
            count = RECORD.unpack_from(data, at)[1]
            end = at + count * RECORD.size
            if end > len(data):  # goes on behind what was looked at
                data = data[:at] + os.pread(self.arrivals.file, max(READ, end - at), self._at[rank] + at)
                if end > len(data):
                    break
            records = [RECORD.unpack_from(data, at + i * RECORD.size) for i in range(count)]
            if not records or any(_check(record[:-1]) != record[-1] for record in records):
                break  # nothing yet, or being written
            self._take(rank, records)
            at, found = end, True
        self._at[rank] += at
        return found

    def _take(self, rank: int, records: list[tuple[int, ...]]) -> None:
        number, _, bits, after, *_ = records[0]
        messages = [Message(way, peer, nbytes, self._next(rank, way, peer)) for *_, way, peer, nbytes, _ in records]
        self.batches[rank].append(Batch(float_of_bits(bits), after, messages))
        for message in messages:
            self.where[rank, message.way, message.peer, message.index] = number


def _check(head: tuple[int, ...]) -> int:
    return functools.reduce(operator.xor, head, WRITTEN)
