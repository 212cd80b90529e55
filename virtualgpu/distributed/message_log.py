"""Which messages every rank of a group has come to, in order: each rank writes its own in a file that all of them have open.

It is the file of the group's page of arrival times, far behind the page, so that it has no name any more when the first message comes, and
what a rank has written can be read when its group is destroyed, or when it has ended.

From these records any rank works out when any message begins and ends, without asking: nobody waits for another process to find
time for an answer, and all come to the same numbers.
"""

import functools
import operator
import os
import struct
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

from virtualgpu.distributed.arrivals import Arrivals, RankEnded, RankLate, float_bits, float_of_bits

# number of the batch, its messages, moment, batch before, direction, peer, bytes, and a check of these
RECORD = struct.Struct("8q")
ROOM = 1 << 34  # bytes for each rank: 268 million messages. What nobody wrote takes no room on the disk
WRITTEN = 1 << 40  # in every check, so that nothing is not a record
SEND, RECV = 0, 1


class Message(NamedTuple):
    """One side of a message. peer: the other rank. index: among those to, or from, that peer in that direction, from 0."""

    direction: int
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
        self.batches: list[list[Batch]] = [[] for _ in range(arrivals.size)]
        self._offsets = [arrivals.nbytes + rank * ROOM for rank in range(arrivals.size)]  # how far read, or written
        self._where: dict[
            tuple[int, int, int, int], int
        ] = {}  # (rank, direction, peer, index): the batch that it is in
        self._counts: dict[tuple[int, int, int], int] = {}

    def write(self, issued: float, after: int, messages: list[tuple[int, int, int]]) -> int:
        """This rank comes to a batch of (direction, peer, nbytes); returns its number."""
        number, bits = len(self.batches[self.rank]), float_bits(issued)
        self._take(self.rank, issued, after, messages)
        if self.arrivals.file is not None:
            heads = [(number, len(messages), bits, after, *message) for message in messages]
            data = b"".join(RECORD.pack(*head, _check(head)) for head in heads)
            self._offsets[self.rank] += os.pwrite(self.arrivals.file, data, self._offsets[self.rank])
        return number

    def batch_of(self, rank: int, direction: int, peer: int, index: int, deadline: float, timeout: timedelta) -> int:
        """The number of the batch in which `rank` has that message. Waits until it has come to it; raises RankEnded or RankLate."""
        pause = 1e-5
        while (rank, direction, peer, index) not in self._where:
            if rank == self.rank or not self._read(rank):
                if time.monotonic() > deadline:
                    raise RankLate([rank], timeout.total_seconds())
                time.sleep(pause)
                pause = min(1e-3, 1.5 * pause)
                if pause == 1e-3 and rank in self.arrivals.ended() and not self._read(rank):
                    raise RankEnded(rank, alive=self.arrivals.left(rank))
        return self._where[rank, direction, peer, index]

    def _take(self, rank: int, issued: float, after: int, messages: Iterable[tuple[int, int, int]]) -> None:
        """A rank's next batch, of (direction, peer, nbytes)."""
        batch = Batch(issued, after, [])
        for direction, peer, nbytes in messages:
            index = self._counts.get((rank, direction, peer), 0)
            self._counts[rank, direction, peer] = index + 1
            self._where[rank, direction, peer, index] = len(self.batches[rank])
            batch.messages.append(Message(direction, peer, nbytes, index))
        self.batches[rank].append(batch)

    def _read(self, rank: int) -> bool:
        """Take in what a rank has written since; False where that is nothing."""
        if self.arrivals.file is None:
            return False
        begin = self._offsets[rank]
        while (batch := self._next_batch(rank)) is not None:
            _, _, bits, after, *_ = batch[0]
            self._take(rank, float_of_bits(bits), after, [record[4:7] for record in batch])
            self._offsets[rank] += len(batch) * RECORD.size
        return self._offsets[rank] > begin

    def _next_batch(self, rank: int) -> list[tuple[int, ...]] | None:
        """Its records; None for nothing yet, or what is being written."""
        head = os.pread(self.arrivals.file, RECORD.size, self._offsets[rank])
        if len(head) < RECORD.size:
            return None
        nbytes = RECORD.unpack(head)[1] * RECORD.size
        data = os.pread(self.arrivals.file, nbytes, self._offsets[rank]) if 0 < nbytes <= ROOM else b""
        records = list(RECORD.iter_unpack(data)) if data and len(data) == nbytes else []
        return records if records and all(_check(record[:-1]) == record[-1] for record in records) else None


def _check(head: tuple[int, ...]) -> int:
    return functools.reduce(operator.xor, head, WRITTEN)
