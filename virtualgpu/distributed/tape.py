"""Which messages every rank of a group has come to, in order: a file of each rank that the others read.

From these records any rank works out when any message begins and ends, without asking: nobody waits for another process to find
time for an answer, and all come to the same numbers.
"""

import contextlib
import os
import struct
import tempfile
import time
from datetime import timedelta
from typing import NamedTuple

from virtualgpu.distributed.moments import RankEnded, RankLate, bits_of, moment_of
from virtualgpu.memory.ledger import started

RECORD = struct.Struct("8q")
SEND, RECV = 0, 1


class Message(NamedTuple):
    """One side of a message. peer: the other rank. nth: among those to, or from, that peer in that direction, from 0."""

    way: int
    peer: int
    nbytes: int
    nth: int


class Batch(NamedTuple):
    """Messages that one rank came to together. issued: when; after: the batch of this rank that must end before, or -1."""

    issued: float
    after: int
    messages: list[Message]


class Tape:
    """The batches of all ranks of a group, as far as they were read. Ranks count within the group."""

    def __init__(self, store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        number, self._path = tempfile.mkstemp(prefix="virtualgpu-", suffix=".tape")
        self._files: dict[int, int] = {rank: number}
        self._pids: dict[int, tuple[int, int]] = {}
        self._at = [0] * size
        self.batches: list[list[Batch]] = [[] for _ in range(size)]
        self.where: dict[tuple[int, int, int, int], int] = {}  # (rank, way, peer, nth): the batch that it is in
        self._counts: dict[tuple[int, int, int], int] = {}
        store.set(f"virtualgpu/tape/{rank}", f"{os.getpid()} {started(os.getpid())} {self._path}")

    def write(self, issued: float, after: int, messages: list[tuple[int, int, int]]) -> int:
        """This rank comes to a batch of (way, peer, nbytes); returns its number."""
        number, bits = len(self._mine), bits_of(issued)
        written = []
        for way, peer, nbytes in messages:
            nth = self._next(self.rank, way, peer)
            written.append(Message(way, peer, nbytes, nth))
            self.where[self.rank, way, peer, nth] = number
        self._mine.append(Batch(issued, after, written))
        data = b"".join(
            RECORD.pack(number, len(written), bits, after, m.way, m.peer, m.nbytes, number ^ bits ^ m.nbytes)
            for m in written
        )
        os.write(self._files[self.rank], data)
        return number

    def batch_of(self, rank: int, way: int, peer: int, nth: int, deadline: float, timeout: timedelta) -> int:
        """The number of the batch in which `rank` has that message. Waits until it has come to it; raises RankEnded or RankLate."""
        pause = 1e-5
        while (rank, way, peer, nth) not in self.where:
            if rank == self.rank or not self._read(rank):
                if time.monotonic() > deadline:
                    raise RankLate([rank], timeout.total_seconds())
                time.sleep(pause)
                pause = min(1e-3, 1.5 * pause)
                if pause == 1e-3 and self._ended(rank) and not self._read(rank):
                    raise RankEnded(rank)
        return self.where[rank, way, peer, nth]

    def close(self) -> None:
        for number in self._files.values():
            os.close(number)
        self._files.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    @property
    def _mine(self) -> list[Batch]:
        return self.batches[self.rank]

    def _next(self, rank: int, way: int, peer: int) -> int:
        count = self._counts.get((rank, way, peer), 0)
        self._counts[rank, way, peer] = count + 1
        return count

    def _open(self, rank: int) -> bool:
        if rank in self._files:
            return True
        key = f"virtualgpu/tape/{rank}"
        if not self.store.check([key]):
            return False
        pid, begun, path = self.store.get(key).decode().split(" ", 2)
        self._pids[rank] = int(pid), int(begun)
        with contextlib.suppress(FileNotFoundError):  # it has closed it
            self._files[rank] = os.open(path, os.O_RDONLY)
        return rank in self._files

    def _ended(self, rank: int) -> bool:
        pid = self._pids.get(rank)
        return pid is not None and started(pid[0]) != pid[1]

    def _read(self, rank: int) -> bool:
        """Take in what a rank has written since; False where that is nothing."""
        if not self._open(rank):
            return False
        data = os.pread(self._files[rank], 1 << 16, self._at[rank])
        batches, at, found = self.batches[rank], 0, False
        while at + RECORD.size <= len(data):
            number, count, bits, after, *_ = RECORD.unpack_from(data, at)
            if at + count * RECORD.size > len(data):
                break
            records = [RECORD.unpack_from(data, at + i * RECORD.size) for i in range(count)]
            if any(number ^ bits ^ record[6] != record[7] for record in records):
                break  # being written
            messages = [Message(r[4], r[5], r[6], self._next(rank, r[4], r[5])) for r in records]
            batches.append(Batch(moment_of(bits), after, messages))
            for message in messages:
                self.where[rank, message.way, message.peer, message.nth] = number
            at += count * RECORD.size
            found = True
        self._at[rank] += at
        return found
