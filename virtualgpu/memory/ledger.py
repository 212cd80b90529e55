"""What each process holds of each GPU, so that processes share the GPUs' memory and tools see it.

The runner makes a folder; each process keeps one small file in it, mapped into its memory: a note is a few stores (under a
microsecond), and whoever wants to know reads the other files. A process that ended holds nothing, however it ended: its pid is
asked of the system, with the moment it started, since pids come again.

    ledger = Ledger(folder, gpus=2)
    ledger.note(0, used=reserved + context, allocated=..., reserved=...)   # when a segment is taken or given back
    ledger.time(0, busy, now)                                               # when the host waits for the GPU
    ledger.others(0)                                                        # bytes that other living processes hold of GPU 0

GPUs are counted as the machine has them, before CUDA_VISIBLE_DEVICES. Bytes and seconds throughout.
"""

import contextlib
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from virtualgpu import environment

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".ledger"
# The process that `other_process` plays; above Linux's largest pid (2^22), so that it is nobody's
PLAYED_PID = (1 << 22) + 1
# A file is words of 8 bytes, in this machine's order. At its head:
PID, STARTED, RANK, BORN, LAST, ENDED = range(6)
# what its collectives came to (the last three are floats: seconds)
COUNT, BYTES, LASTED, HIDDEN, WAITED, HEAD = 8, 9, 10, 11, 12, 16
# and then for each GPU; BUSY, NOW and COMPUTING are floats:
USED, ALLOCATED, RESERVED, BUSY, NOW, COMPUTING, PLAYED, EACH = 0, 1, 2, 3, 4, 5, 6, 8

_ledgers: "weakref.WeakSet[Ledger]" = weakref.WeakSet()


class Usage(NamedTuple):
    """One process on one GPU: bytes held now (context included), peaks of its tensors and its segments, simulated seconds.
    busy: as nvidia-smi counts, with NCCL's kernels; computing: other kernels alone.
    played: bytes of another process that this one plays (`other_process`)."""

    used: int
    peak_allocated: int
    peak_reserved: int
    busy: float
    now: float
    computing: float = 0.0
    played: int = 0


class Communication(NamedTuple):
    """What a process's collectives came to. seconds: that they lasted; hidden: of these, while kernels of its GPU ran; waited: for
    the last rank to come.
    """

    count: int = 0  # type: ignore[assignment]  # a tuple has a method of that name
    nbytes: int = 0
    seconds: float = 0.0
    hidden: float = 0.0
    waited: float = 0.0


class Entry(NamedTuple):
    """One process. `born`, `last`: wall-clock nanoseconds of its first and last note."""

    pid: int
    rank: int  # -1: none
    born: int
    last: int
    ended: bool  # it said so; `alive` asks the system
    started: int
    gpus: list[Usage]
    communication: Communication = Communication()

    def alive(self) -> bool:
        """Is there a process of this pid that started at that moment, and has it not said that it ended?"""
        return not self.ended and started(self.pid) == self.started


class Ledger:
    """This process's page. Its file appears with the first note, so a process that uses no GPU leaves none."""

    def __init__(self, folder: str, gpus: int):
        self.folder, self.gpus = folder, gpus
        self._words: Any = None
        self._floats: Any = None
        _ledgers.add(self)

    def note(self, gpu: int, used: int, allocated: int = 0, reserved: int = 0, played: int = 0) -> None:
        """This process now holds `used` bytes of the GPU, and plays another with `played`; of peaks, the largest noted counts."""
        words = self._words or self._open()
        index = HEAD + EACH * gpu
        words[index], words[index + PLAYED] = used, played
        if allocated > words[index + ALLOCATED]:
            words[index + ALLOCATED] = allocated
        if reserved > words[index + RESERVED]:
            words[index + RESERVED] = reserved
        words[LAST] = time.time_ns()

    def time(self, gpu: int, busy: float, now: float, computing: float | None = None) -> None:
        """The GPU's kernels have run for `busy` of `now` simulated seconds, those that are not NCCL's for `computing` (None: all)."""
        if self._words is None:
            self._open()
        index = HEAD + EACH * gpu
        self._floats[index + BUSY], self._floats[index + NOW] = busy, now
        self._floats[index + COMPUTING] = busy if computing is None else computing
        self._words[LAST] = time.time_ns()

    def communicate(self, what: Communication) -> None:
        """What this process's collectives have come to so far."""
        words = self._words or self._open()
        words[COUNT], words[BYTES] = what.count, what.nbytes
        self._floats[LASTED], self._floats[HIDDEN], self._floats[WAITED] = what[2:]
        words[LAST] = time.time_ns()

    def rank(self, rank: int) -> None:
        """The name of this process in tables and traces."""
        (self._words or self._open())[RANK] = rank

    def others(self, gpu: int) -> int:
        """What other living processes hold of a GPU."""
        return sum(used for _, used in self.processes(gpu))

    def processes(self, gpu: int) -> list[tuple[int, int]]:
        """Pid and bytes of each other living process that holds some of a GPU."""
        mine = os.getpid()
        return _holding([entry for entry in entries(self.folder) if entry.pid != mine], gpu)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time: between asking for `others` and noting a segment, nobody else takes the room."""
        try:
            file = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # the runner has ended, and its folder with it
            yield
            return
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing alone leaves it to a process that was forked meanwhile
            os.close(file)

    def end(self) -> None:
        """This process gives everything back. Its peaks and times stay for the table."""
        if self._words is not None:
            for gpu in range(self.gpus):
                self._words[HEAD + EACH * gpu + USED] = self._words[HEAD + EACH * gpu + PLAYED] = 0
            self._words[ENDED] = 1

    @property
    def begun(self) -> bool:
        """Has this process noted anything?"""
        return self._words is not None

    def _open(self):
        nbytes = 8 * (HEAD + EACH * self.gpus)
        try:
            with open(os.path.join(self.folder, f"{os.getpid()}{SUFFIX}"), "w+b", buffering=0) as file:
                file.write(bytes(nbytes))  # not truncate: on a full disk the first store would end the process (SIGBUS)
                memory = memoryview(mmap.mmap(file.fileno(), nbytes))
        except (OSError, ValueError) as error:  # ValueError: written in part
            if not isinstance(
                error, FileNotFoundError
            ):  # else the runner has ended, and its folder with it: nobody reads on
                warnings.warn(
                    f"virtual GPUs: there is no room in {self.folder} ({error}). What this process holds is in no table, and other "
                    "processes do not see it: free some space there, or set TMPDIR to another folder",
                    stacklevel=2,
                )
            memory = memoryview(bytearray(nbytes))
        self._floats, words = memory.cast("d"), memory.cast("q")
        words[STARTED], words[RANK], words[BORN] = started(os.getpid()), environment.rank(), time.time_ns()
        words[PID] = os.getpid()  # last: a file without one is not read yet
        self._words = words
        return words


class Board:
    """What the driver would know, in any process under the runner: the cards, and what all processes hold of them."""

    def __init__(self, settings: environment.Settings):
        self.cards, self.folder = settings.cards, settings.folder

    def processes(self, gpu: int) -> list[tuple[int, int]]:
        """Pid and bytes of each process that holds some of this GPU."""
        return _holding(entries(self.folder) if self.folder else [], gpu)

    def busy(self, gpu: int) -> tuple[float, float]:
        """For how long its kernels ran, NCCL's too, of how many simulated seconds, so far."""
        living = [usage for _, usage in self._living(gpu)]
        return sum(usage.busy for usage in living), max((usage.now for usage in living), default=0.0)

    def _living(self, gpu: int) -> list[tuple[Entry, Usage]]:
        known = entries(self.folder) if self.folder else []
        return [(entry, entry.gpus[gpu]) for entry in known if gpu < len(entry.gpus) and entry.alive()]


def _holding(known: list[Entry], gpu: int) -> list[tuple[int, int]]:
    held = []
    for entry in known:
        usage = entry.gpus[gpu] if gpu < len(entry.gpus) else None
        if usage is not None and (usage.used or usage.played) and entry.alive():
            held += [(entry.pid, usage.used), (PLAYED_PID, usage.played)]
    return [(pid, used) for pid, used in held if used]


def share(busy: tuple[float, float], before: tuple[float, float]) -> float:
    """The share of time in which a GPU was busy between two answers of `Board.busy`: 0 to 1."""
    passed = busy[1] - before[1]
    return min(1.0, max(0.0, (busy[0] - before[0]) / passed)) if passed > 0 else 0.0


def entries(folder: str) -> list[Entry]:
    """Every process that noted something, the ended ones too, in the order in which they began."""
    result = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.endswith(SUFFIX):
                with open(os.path.join(folder, name), "rb") as file:
                    entry = _read(file.read())
                if entry is not None:
                    result.append(entry)
    return sorted(result, key=lambda entry: (entry.born, entry.pid))


def by_rank(processes: list[Entry]) -> list[tuple[int, Entry]]:
    """Entries with their numbers, ranks in their order before those that are none."""
    return sorted(enumerate(processes), key=lambda pair: (pair[1].rank < 0, pair[1].rank))


def _read(content: bytes) -> Entry | None:
    if len(content) < 8 * HEAD:
        return None
    words, real = memoryview(content).cast("q"), memoryview(content).cast("d")
    gpus = [
        Usage(
            words[index],
            words[index + ALLOCATED],
            words[index + RESERVED],
            real[index + BUSY],
            real[index + NOW],
            real[index + COMPUTING],
            words[index + PLAYED],
        )
        for index in range(HEAD, len(words), EACH)
    ]
    if not words[PID]:
        return None
    communication = Communication(words[COUNT], words[BYTES], real[LASTED], real[HIDDEN], real[WAITED])
    return Entry(
        words[PID], words[RANK], words[BORN], words[LAST], bool(words[ENDED]), words[STARTED], gpus, communication
    )


def started(pid: int) -> int:
    """When a process started, in the system's ticks; 0 where the system cannot say, -1 for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])  # proc(5): state, starttime
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return -1
    try:  # no /proc: macOS
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        pass
    return 0


def _in_forked_child() -> None:
    """A forked process holds none of its parent's memory, and must not write on its parent's page."""
    for ledger in _ledgers:
        ledger._words = ledger._floats = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
