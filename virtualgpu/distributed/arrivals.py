"""How ranks tell each other when, on their simulated clocks, they came to a collective: a page of memory that they share.

Each rank writes its moment before the collective's numbers travel, and reads the others' when it needs to know the end; by then
they are nearly always there, so that the exchange costs microseconds. What is read depends on the program alone, never on how
fast the processes really ran.

    arrivals = Arrivals.meet(store, rank, size)               # all ranks of the group call it
    arrivals.post(1, moment, words, timeout)              # collectives are numbered from 1; `words`: four whole numbers about it
    arrivals.come(1)                                      # [(rank, words)] of the others that have come to it so far
    arrivals.read(1, timeout)                             # the moment of the last, and the words of rank 0, of rank 1, ...
"""

import contextlib
import mmap
import os
import platform
import struct
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from virtualgpu import scratch
from virtualgpu.memory.ledger import started

SLOTS = 1024  # collectives that a rank may be ahead of the slowest one
Words = tuple[int, int, int, int]  # what a rank says of a collective
SLOT = 6  # words: the moment, what is said, and all of them with the number, so that a half-written slot is known
RECORD = struct.Struct(f"{SLOT}q")
# words at the head of a rank's part: up to which number it has read, who it is, how it left where it comes to nothing more, and which
# message it waits for
READ, PID, STARTED, OVER, WAITS, HEAD = 0, 1, 2, 3, 4, 5
LEFT, RAISED = 1, 2  # how


def float_bits(moment: float) -> int:
    """A moment as a whole number, to the last bit."""
    return struct.unpack("q", struct.pack("d", moment))[0]


def float_of_bits(bits: int) -> float:
    """The moment that `float_bits` made this number of."""
    return struct.unpack("d", struct.pack("q", bits))[0]


class RankEnded(RuntimeError):
    """A rank that will not come. `rank`: within the group; `left`: how, where it was done with the group: LEFT, or RAISED an error."""

    def __init__(self, rank: int, left: int = 0):
        super().__init__(f"rank {rank} has {'left' if left else 'ended'}")
        self.rank, self.left = rank, left


class RankLate(RuntimeError):
    """Ranks that had not come in time. `ranks`: within the group."""

    def __init__(self, ranks: list[int], seconds: float):
        super().__init__(f"after {seconds:g} s rank {', '.join(map(str, ranks))} had not come")
        self.ranks, self.seconds = ranks, seconds


def _new_file(folder: str | None, nbytes: int) -> tuple[int, str]:
    """A file of zeros, open. Its room is taken now: where a disk is full, a store into mapped memory would end the process (SIGBUS)."""
    path = None
    try:
        fd, path = tempfile.mkstemp(prefix=scratch.PREFIX, suffix=".moments", dir=folder)
        scratch.hold(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(bytes(nbytes))
    except OSError as error:
        if path is not None:
            os.close(fd)
            os.unlink(path)
        raise RuntimeError(
            f"ranks of virtual GPUs share a page of memory, and there is no room for it in {folder or tempfile.gettempdir()} "
            f"({error}): free some space there, or set TMPDIR to another folder"
        ) from error
    return fd, path


def _open(store) -> tuple[int, str]:
    """The file that rank 0 names in the store. One that is gone is of an earlier group by that name in the same store: another will come."""
    value = store.get("virtualgpu/page")
    while True:
        path, node = value.decode().split(" ", 1)
        path = os.fsdecode(bytes.fromhex(path))
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR), path
        if node != platform.node():
            raise RuntimeError(
                "ranks of virtual GPUs share a page of memory, so all of them run on one machine: start them here"
            )
        value = store.get("virtualgpu/page", other_than=value)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class Arrivals:
    """The arrival times of one group. Ranks count within the group. file: the number of the open file that the page is mapped from, None
    where it is one rank's alone; behind the page is room for what ranks write for each other (`message_log`, `agreement`).
    """

    file: int | None = None
    name = ""  # of the page, which no other has
    _remove: Callable[[], object] | None = None  # takes away the file's name

    def __init__(self, words: memoryview, rank: int, size: int, file: int | None = None):
        self._words, self.rank, self.size, self.file = words, rank, size, file
        if file is not None:
            weakref.finalize(self, os.close, file)  # works of a group that is destroyed may still read it
        self._each = HEAD + SLOTS * SLOT
        self._read = 0
        mine = rank * self._each
        words[mine + STARTED], words[mine + PID] = started(os.getpid()), os.getpid()

    @classmethod
    def meet(cls, store, rank: int, size: int, folder: str | None = None) -> "Arrivals":
        """Rank 0 makes the page, as a file that is gone as soon as all have it. Raises RuntimeError on another machine, and where
        there is no room for it."""
        nbytes = 8 * size * (HEAD + SLOTS * SLOT)
        if size == 1:
            return cls(memoryview(bytearray(nbytes)).cast("q"), rank, size)
        if rank == 0:
            fd, path = _new_file(folder, nbytes)
            try:  # as hex: a path may have letters that no locale knows
                store.set("virtualgpu/page", f"{os.fsencode(path).hex()} {platform.node()}")
            except RuntimeError:
                os.close(fd)
                os.unlink(path)
                raise
        else:
            fd, path = _open(store)
        arrivals = cls(memoryview(mmap.mmap(fd, nbytes)).cast("q"), rank, size, fd)
        arrivals.name = os.path.basename(path)
        if rank == 0:  # also where not all ranks come
            arrivals._remove = weakref.finalize(arrivals, _unlink, path)
        if store.add(f"virtualgpu/{arrivals.name}/met", 1) == size:
            _unlink(path)
        return arrivals

    def unname(self) -> None:
        """All ranks have it, or one will never come: its file needs no name any more."""
        if self._remove is not None:
            self._remove()

    def post(self, number: int, moment: float, words: Words, timeout: timedelta) -> list[tuple[int, Words]]:
        """This rank has come to collective `number`; returns those that had come before, as `come`. Waits where it is too far ahead;
        raises as `read`."""
        if number > SLOTS:
            self._wait(lambda rank: self._words[rank * self._each + READ] >= number - SLOTS, timeout)
        offset = 8 * (self.rank * self._each + HEAD + number % SLOTS * SLOT)
        bits = float_bits(moment)
        first, second, third, fourth = words
        check = number ^ bits ^ first ^ second ^ third ^ fourth
        RECORD.pack_into(self._words, offset, bits, *words, check)
        return self.come(number) if self.size > 1 else []

    def come(self, number: int) -> list[tuple[int, Words]]:
        """The other ranks that have come to it so far, and what they said. Called after `post`: of two ranks, at least one sees the
        other."""
        slots = [(rank, self._slot(rank, number)) for rank in range(self.size) if rank != self.rank]
        return [(rank, slot[1]) for rank, slot in slots if slot is not None]

    def read(self, number: int, timeout: timedelta) -> tuple[float, list[Words]]:
        """When the last rank came to it, and what each said. Raises RankEnded or RankLate for one that does not come."""
        moments, all_words = [], []
        for rank in range(self.size):
            slot = self._slot(rank, number)
            if slot is None:
                self._wait(lambda rank: self._slot(rank, number) is not None, timeout)
                slot = self._slot(rank, number)
            moments.append(slot[0])
            all_words.append(slot[1])
        self._read = max(self._read, number)
        self._words[self.rank * self._each + READ] = self._read
        return max(moments), all_words

    def _slot(self, rank: int, number: int) -> tuple[float, Words] | None:
        offset = 8 * (rank * self._each + HEAD + number % SLOTS * SLOT)
        bits, first, second, third, fourth, check = RECORD.unpack_from(self._words, offset)
        if number ^ bits ^ first ^ second ^ third ^ fourth != check:
            return None
        return float_of_bits(bits), (first, second, third, fourth)

    def _wait(self, arrived, timeout: timedelta) -> None:
        """Until it is true of every rank: at first looking again at once, then with pauses of up to a millisecond."""
        late = [rank for rank in range(self.size) if not arrived(rank)]
        if not late:
            return
        begin, pause, looks = time.monotonic(), 1e-5, 0
        while late := [rank for rank in late if not arrived(rank)]:
            passed = time.monotonic() - begin
            if passed > timeout.total_seconds():
                raise RankLate(late, timeout.total_seconds())
            looks += 1
            if looks % 100 == 0:  # every tenth of a second, when pauses are longest
                self._look_for_the_dead(late, arrived)
            time.sleep(pause)
            pause = min(1e-3, 1.5 * pause)

    def ended(self) -> list[int]:
        """Ranks whose process is gone, or is done with the group."""
        return [rank for rank in range(self.size) if self.left(rank) or self._gone(rank)]

    def left(self, rank: int) -> bool:
        """Is a rank done with the group?"""
        return bool(self._words[rank * self._each + OVER])

    def gone(self, rank: int) -> RankEnded:
        """What to raise of one that has ended, or is done with the group."""
        how = self._words[rank * self._each + OVER]
        return RankEnded(rank, how if how == RAISED or not self._gone(rank) else 0)

    def leave(self, how: int = LEFT) -> None:
        """This rank will come to nothing more: others need not wait."""
        self._words[self.rank * self._each + OVER] = how

    def wait_for(self, message: int) -> None:
        """This rank waits for that message (a word of `message_log`); 0: for none."""
        self._words[self.rank * self._each + WAITS] = message

    def waits(self, rank: int) -> int:
        """The message that a rank waits for; 0 for none."""
        return self._words[rank * self._each + WAITS]

    def _gone(self, rank: int) -> bool:
        pid, start = self._words[rank * self._each + PID], self._words[rank * self._each + STARTED]
        return bool(pid) and started(pid) != start

    @property
    def nbytes(self) -> int:
        """Of the page itself."""
        return 8 * self.size * (HEAD + SLOTS * SLOT)

    def behind(self, number: int) -> list[int]:
        """Ranks that have not come to collective `number`."""
        return [rank for rank in range(self.size) if self._slot(rank, number) is None]

    def _look_for_the_dead(self, ranks: list[int], arrived) -> None:
        for rank in self.ended():
            if rank in ranks and not arrived(rank):
                raise self.gone(rank)


class SingleRankArrivals(Arrivals):
    """For one process that plays one rank of many: the others are taken to be like it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self._posted = rank, size, {}

    def post(self, number: int, moment: float, words: Words, timeout: timedelta) -> list[tuple[int, Words]]:
        """Only noted, for `read`; never waits."""
        self._posted[number] = moment, [words]
        return []

    def come(self, number: int) -> list[tuple[int, Words]]:
        """Nobody: there are no other processes."""
        return []

    def read(self, number: int, timeout: timedelta) -> tuple[float, list[Words]]:
        """This rank's own moment and words, once for all ranks. A collective can be read once."""
        return self._posted.pop(number)

    def leave(self, how: int = LEFT) -> None:
        """Nobody waits."""

    def ended(self) -> list[int]:
        """Nobody: there are no other processes."""
        return []

    def behind(self, number: int) -> list[int]:
        """Nobody: the others come when this rank does."""
        return []
