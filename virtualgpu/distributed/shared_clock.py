"""How ranks meet, and tell each other on a page of memory that they share when, on the simulated clock, each came to what."""

import contextlib
import mmap
import os
import platform
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist

from virtualgpu import scratch
from virtualgpu.memory.ledger import started

# -- How ranks tell each other when, on their simulated clocks, they came to a collective: a page of memory that they share.
#
# Each rank writes its moment before the collective's numbers travel, and reads the others' when it needs to know the end; by then
# they are nearly always there, so that the exchange costs microseconds. What is read depends on the program alone, never on how
# fast the processes really ran.
#
#     arrivals = Arrivals.meet(store, rank, size)               # all ranks of the group call it
#     arrivals.post(1, moment, signature, timeout)          # collectives are numbered from 1; `signature`: four whole numbers about it
#     arrivals.come(1)                                      # [(rank, signature)] of the others that have come to it so far
#     arrivals.read(1, timeout)                             # the moment of the last, and the signature of rank 0, of rank 1, ...

SLOTS = 1024  # collectives that a rank may be ahead of the slowest one
Signature = tuple[int, int, int, int]  # what a rank tells of a collective (`calls.signature_of`)
SLOT = 6  # words: the moment, what is said, and all of them with the number, so that a half-written slot is known
ARRIVAL, MOMENT = struct.Struct(f"{SLOT}q"), struct.Struct(f"d{SLOT - 1}q")  # its moment in bits, and as a number
# words at the head of a rank's part: up to which number it has read, who it is, how it left where it comes to nothing more, and which
# message it waits for
READ, PID, STARTED, OVER, WAITS, HEAD = 0, 1, 2, 3, 4, 5
LEFT, RAISED = 1, 2  # how
# Bytes behind the page for each rank's messages: 268 million. What nobody wrote takes no room on the disk
ROOM = 1 << 34
real_sleep, real_time = time.sleep, time.monotonic  # the program's are others while virtual GPUs are on


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
    where it is one rank's alone; behind the page is room for what ranks write for each other (their messages, what they call).
    """

    file: int | None = None
    name = ""  # of the page, which no other has
    _remove: Callable[[], object] | None = None  # takes away the file's name

    def __init__(self, page: memoryview, rank: int, size: int, file: int | None = None):
        self._page, self.rank, self.size, self.file = page, rank, size, file
        if file is not None:
            weakref.finalize(self, os.close, file)  # works of a group that is destroyed may still read it
        self._each = HEAD + SLOTS * SLOT
        self._slots = [8 * (member * self._each + HEAD) for member in range(size)]  # in bytes: where each rank's begin
        self._read = 0
        mine = rank * self._each
        page[mine + STARTED], page[mine + PID] = started(os.getpid()), os.getpid()

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

    def post(self, number: int, moment: float, signature: Signature, timeout: timedelta) -> list[tuple[int, Signature]]:
        """This rank has come to collective `number`; returns those that had come before, as `come`. Waits where it is too far ahead;
        raises as `read`."""
        if number > SLOTS:
            self._wait(self._have_not_read, number - SLOTS, timeout)
        bits = float_bits(moment)
        first, second, third, fourth = signature
        check = number ^ bits ^ first ^ second ^ third ^ fourth
        offset = self._slots[self.rank] + ARRIVAL.size * (number % SLOTS)
        ARRIVAL.pack_into(self._page, offset, bits, *signature, check)
        return self.come(number) if self.size > 1 else []

    def come(self, number: int) -> list[tuple[int, Signature]]:
        """The other ranks that have come to it so far, and what they said. Called after `post`: of two ranks, at least one sees the
        other."""
        there, offset = [], ARRIVAL.size * (number % SLOTS)
        for rank, slots in enumerate(self._slots):
            bits, first, second, third, fourth, check = ARRIVAL.unpack_from(self._page, slots + offset)
            if rank != self.rank and number ^ bits ^ first ^ second ^ third ^ fourth == check:
                there.append((rank, (first, second, third, fourth)))
        return there

    def read(self, number: int, timeout: timedelta) -> tuple[float, list[Signature]]:
        """When the last rank came to it, and what each said. Raises RankEnded or RankLate for one that does not come."""
        self._wait(self.behind, number, timeout)
        moments, signatures, offset = [], [], ARRIVAL.size * (number % SLOTS)
        for slots in self._slots:
            moment, *signature, _ = MOMENT.unpack_from(self._page, slots + offset)
            moments.append(moment)
            signatures.append(tuple(signature))
        self._read = max(self._read, number)
        self._page[self.rank * self._each + READ] = self._read
        return max(moments), signatures

    def behind(self, number: int) -> list[int]:
        """Ranks that have not come to collective `number`."""
        late, offset = [], ARRIVAL.size * (number % SLOTS)
        for rank, slots in enumerate(self._slots):
            bits, first, second, third, fourth, check = ARRIVAL.unpack_from(self._page, slots + offset)
            if number ^ bits ^ first ^ second ^ third ^ fourth != check:
                late.append(rank)
        return late

    def _have_not_read(self, number: int) -> list[int]:
        """Ranks that do not know yet when collective `number` ended."""
        read = self._page[READ :: self._each]
        return [rank for rank in range(self.size) if read[rank] < number]

    def _wait(self, behind: Callable[[int], list[int]], number: int, timeout: timedelta) -> None:
        """Until no rank is behind `number`: at first looking again at once, then with pauses of up to a millisecond."""
        begin, pause, looks = real_time(), 1e-5, 0
        while late := behind(number):
            if real_time() - begin > timeout.total_seconds():
                raise RankLate(late, timeout.total_seconds())
            looks += 1
            if looks % 100 == 0:  # every tenth of a second, when pauses are longest
                for rank in self.ended():
                    if rank in late and rank in behind(number):
                        raise self.gone(rank)
            real_sleep(pause)
            pause = min(1e-3, 1.5 * pause)

    def ended(self) -> list[int]:
        """Ranks whose process is gone, or is done with the group."""
        return [rank for rank in range(self.size) if self._page[rank * self._each + OVER] or self._gone(rank)]

    def gone(self, rank: int) -> RankEnded:
        """What to raise of one that has ended, or is done with the group."""
        how = self._page[rank * self._each + OVER]
        return RankEnded(rank, how if how == RAISED or not self._gone(rank) else 0)

    def leave(self, how: int = LEFT) -> None:
        """This rank will come to nothing more: others need not wait."""
        self._page[self.rank * self._each + OVER] = how

    def wait_for(self, message: int) -> None:
        """This rank waits for that message (a word of the message log); 0: for none."""
        self._page[self.rank * self._each + WAITS] = message

    def waits(self, rank: int) -> int:
        """The message that a rank waits for; 0 for none."""
        return self._page[rank * self._each + WAITS]

    def _gone(self, rank: int) -> bool:
        pid, start = self._page[rank * self._each + PID], self._page[rank * self._each + STARTED]
        return bool(pid) and started(pid) != start

    @property
    def nbytes(self) -> int:
        """Of the page itself."""
        return 8 * self.size * (HEAD + SLOTS * SLOT)


class SingleRankArrivals(Arrivals):
    """For one process that plays one rank of many: the others are taken to be like it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._posted: dict[int, tuple[float, list[Signature]]] = {}

    def post(self, number: int, moment: float, signature: Signature, timeout: timedelta) -> list[tuple[int, Signature]]:
        """Only noted, for `read`; never waits."""
        self._posted[number] = moment, [signature]
        return []

    def come(self, number: int) -> list[tuple[int, Signature]]:
        """Nobody: there are no other processes."""
        return []

    def read(self, number: int, timeout: timedelta) -> tuple[float, list[Signature]]:
        """This rank's own moment and signature, once for all ranks. A collective can be read once."""
        return self._posted.pop(number)

    def leave(self, how: int = LEFT) -> None:
        """Nobody waits."""

    def ended(self) -> list[int]:
        """Nobody: there are no other processes."""
        return []

    def behind(self, number: int) -> list[int]:
        """Nobody: the others come when this rank does."""
        return []


# -- Before a group's first collective: ranks meet in the group's store. One that ended, or does not come in time, is named, here and
# wherever else ranks wait for each other (`explain`).
#
# Each rank says in the store which process it is when its group is made, and so before it may end.


ORDER = "Do all ranks call the same collectives in the same order?"
LOOK = 0.1  # seconds between two looks for ranks that have ended


class Process(NamedTuple):
    """Of one rank, as it says when its group is made."""

    pid: int
    start: int

    @property
    def is_gone(self) -> bool:
        """Has it ended?"""
        return started(self.pid) != self.start


def announce(store, rank: int) -> None:
    """This rank says in its group's store which process it is."""
    store.set(f"virtualgpu/process/{rank}", f"{os.getpid()} {started(os.getpid())}")


def processes(store, size: int) -> list[Process]:
    """All ranks' processes, once they have said it: the store may be gone when they are asked for."""
    return [Process(*map(int, store.get(f"virtualgpu/process/{rank}").split())) for rank in range(size)]


class Meeting:
    """The store, as `Arrivals.meet` uses it. processes: of all ranks, or none. returned: has a rank of the group returned from its
    function? Where the store is gone, its methods raise RankEnded."""

    def __init__(self, store, size: int, timeout: timedelta, processes: list[Process], returned: Callable[[int], bool]):
        self.store, self.size, self.timeout, self.processes, self.returned = store, size, timeout, processes, returned
        self.until = real_time() + timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        """For the others."""
        self._ask(self.store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        """The sum of what all have added."""
        return self._ask(self.store.add, key, amount)

    def get(self, key: str, rank: int = 0, other_than: bytes | None = None) -> bytes:
        """What that rank has set, after another value that it had set before. Raises RankEnded or RankLate where it does not."""
        self.wait({key: rank}, other_than)
        return self._ask(self.store.get, key)

    def wait(self, keys: dict[str, int], other_than: bytes | None = None) -> None:
        """Until all of these are there: each is set by a rank. Raises as `get`."""
        pause, look = 1e-4, real_time() + LOOK

        def there(*names: str) -> bool:
            known = self.store.check(list(names))
            return known and (other_than is None or all(self.store.get(name) != other_than for name in names))

        while not self._ask(there, *keys):
            now = real_time()
            if now > look:
                look = now + LOOK
                late = [rank for key, rank in keys.items() if not self._ask(there, key)]
                for rank in late:
                    if self._gone(rank) or self.returned(rank):
                        raise RankEnded(rank, 0 if self._gone(rank) else LEFT)
                if now > self.until and late:
                    raise RankLate(late, self.timeout.total_seconds())
            real_sleep(pause)
            pause = min(1e-2, 1.5 * pause)

    def _gone(self, rank: int) -> bool:
        return bool(self.processes) and self.processes[rank].is_gone

    def _ask(self, question: Callable, *args):
        """The process that holds the store is most often a rank, and may have ended."""
        try:
            return question(*args)
        except RuntimeError:
            real_sleep(LOOK)  # a process that is ending closes its sockets first
            for rank in range(self.size):
                if self._gone(rank):
                    raise RankEnded(rank) from None
            raise


def explain(
    error: RuntimeError,
    what: str,
    rank: int,
    group: str,
    ranks: Sequence[int],
    timeout: timedelta,
    ended: Callable[[], list[int]] = list,
    behind: Callable[[], list[int]] = list,
) -> None:
    """Raises DistBackendError, which names the ranks that did not come; returns where the error is about something else.

    what: this rank, a member of that group, waited in; ranks: the global rank of each member; ended, behind: the members that are gone,
    and that are late, where the error does not say.
    """
    if isinstance(error, (torch.OutOfMemoryError, dist.DistBackendError)):
        return
    where, text = f"{what} of rank {ranks[rank]} in group {group!r}", str(error)

    def names(members: list[int]) -> str:
        return f"rank {', '.join(str(ranks[member]) for member in members)}" if members else "another rank"

    if isinstance(error, RankEnded) and error.left:
        it_has = "raised an error, which stands in its own output"
        if error.left != RAISED:
            it_has = f"has returned, or destroyed the group. {ORDER}"
        message = f"{where}: {names([error.rank])} will not come to it: it {it_has}"
    elif isinstance(error, RankEnded) or "Connection closed by peer" in text or "Connection reset" in text:
        gone = [error.rank] if isinstance(error, RankEnded) else ended()
        message = (
            f"{where}: {names(gone)} has ended, and this rank waited for it. What stopped it stands in its own output"
        )
    elif isinstance(error, RankLate) or "timed out" in text.lower():
        late = error.ranks if isinstance(error, RankLate) else behind()
        world = dist.group.WORLD  # new_group does not take its limit over
        maker = "init_process_group" if world is None or world.group_name == group else "new_group"
        message = (
            f"{where} timed out after {timeout.total_seconds():g} s: {names(late)} had not come to it. {ORDER} "
            f"The limit is {maker}(timeout=...)"
        )
    else:
        return
    raise dist.DistBackendError(message) from error
