"""The faults: each is prepared before the program starts, strikes at a moment, and says which words the program owes then."""

import contextlib
import os
import random
import resource
import signal
import time
from dataclasses import dataclass, field

import psutil

from tests.faults.place import Place

KILL, STOP, FILL, STARVE = "kill", "stop", "fill", "starve"
ROOM = r"space|full|too large|disk|quota|[Rr]ead-only|writ"
MEMORY = r"memory|allocate|map segment|thread|ulimit -v|SIG(KILL|ABRT|SEGV)"
FILES = r"open files|ulimit -n"
READS_ALL = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")  # an environment in root's folders, too
PROCESSES = r"process|thread|[Rr]esource temporarily|fork"


@dataclass
class Fault:
    """name: with all that was drawn. owes: a pattern that the program's words match, where it ends with an error. ended_by: signals that may end it
    without a word. strikes_first: the process that the program is, rather than one that it started. is_right: must the result come all the same?"""

    name: str
    kind: str
    owes: str = ""
    ended_by: tuple[int, ...] = ()
    is_right: bool = False
    limits: dict[int, int] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    cores: int | None = None
    disk: str | None = None
    is_locked: bool = False
    number: int | None = None
    whom: str = "first"
    pause: float = 0.0
    then: int | None = None
    draw: float = 0.0

    def prepare(self) -> None:
        """In the new process."""
        for limit, value in self.limits.items():
            resource.setrlimit(limit, (value, value))
        if self.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.cores])

    def strike(self, place: Place) -> str:
        """Now. What was struck."""
        if self.disk:
            if self.is_locked and place.lock(self.disk):
                return f"{self.disk}, read-only"
            place.fill(self.disk)
            return f"{self.disk}, full"
        if self.number is None:
            return ""
        whom = self._target(place)
        if whom is not None and whom.pid == place.process.pid:  # it has started nobody
            self.ended_by += (self.number, self.then)
        self._send(place, whom, self.number)
        if self.number == signal.SIGSTOP:
            time.sleep(self.pause)
            self._send(place, whom, self.then)
        return "group" if whom is None else _name(whom)

    def _target(self, place: Place) -> psutil.Process | None:
        """None: the whole group."""
        members = place.members() if self.whom == "member" else []
        if members:
            return members[int(self.draw * len(members))]
        return None if self.whom == "group" else psutil.Process(place.process.pid)

    def _send(self, place: Place, whom: psutil.Process | None, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(place.process.pid, number) if whom is None else os.kill(whom.pid, number)


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
        known = next((word for word in words[1:] if not word.startswith("-") and len(word) < 60), "")
        return f"{process.name()} {os.path.basename(known)}".strip()[:40]
    except psutil.Error:
        return "one that had ended"


def draw(dice: random.Random, kinds: tuple[str, ...], is_root: bool, has_disks: bool) -> Fault:
    """One of these kinds."""
    kind = dice.choice(kinds)
    if kind == KILL:
        return _kill(dice)
    if kind == STOP:
        return _stop(dice)
    if kind == FILL:
        return _fill(dice, has_disks)
    return _starve(dice, is_root)


def _kill(dice: random.Random) -> Fault:
    number = dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    whom = dice.choice(["first", "group", "member", "member"])
    if whom == "member" and number == signal.SIGINT:
        number = signal.SIGKILL  # nobody interrupts a single one
    ended_by = () if whom == "member" else (number,)
    return Fault(f"{number.name} {whom}", KILL, r"SIG[A-Z]+|signal|kill|died|[Ii]nterrupt|exit|ended", ended_by,
                 number=number, whom=whom, draw=dice.random())  # fmt: skip


def _stop(dice: random.Random) -> Fault:
    whom, pause = dice.choice(["first", "group", "member"]), dice.choice([0.3, 2.0, 6.0])
    goes_on = dice.random() < 0.6
    then = signal.SIGCONT if goes_on else signal.SIGKILL
    ended_by = () if goes_on or whom == "member" else (signal.SIGKILL,)
    return Fault(f"SIGSTOP {whom} {pause:g} s {then.name}", STOP, r"SIG[A-Z]+|kill|died|signal|ended", ended_by, goes_on,
                 number=signal.SIGSTOP, whom=whom, pause=pause, then=then, draw=dice.random())  # fmt: skip


def _fill(dice: random.Random, has_disks: bool) -> Fault:
    if not has_disks or dice.random() < 0.25:
        size = dice.choice([0, 1 << 10, 64 << 10, 1 << 20, 8 << 20])
        return Fault(f"files of {size} B at most", FILL, ROOM, limits={resource.RLIMIT_FSIZE: size})
    disk, is_locked = dice.choice(["work", "work", "tmp", "tmp", "shm"]), dice.random() < 0.2
    return Fault(f"{disk} {'read-only' if is_locked else 'full'}", FILL, ROOM, disk=disk, is_locked=is_locked)


def _starve(dice: random.Random, is_root: bool) -> Fault:
    what = dice.choice(["files", "memory", "processes", "core"])
    if what == "files":
        number = dice.choice([12, 16, 20, 24, 32, 48, 64, 96, 160])
        return Fault(f"ulimit -n {number}", STARVE, FILES, limits={resource.RLIMIT_NOFILE: number})
    if what == "memory":
        gigabytes = dice.choice([0.1, 0.25, 0.5, 1.0, 2.0, 4.0])
        return Fault(f"ulimit -v {gigabytes:g} GB", STARVE, MEMORY, (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS),
                     limits={resource.RLIMIT_AS: int(gigabytes * 2**30)})  # fmt: skip
    if what == "processes":
        number, user = dice.choice([1, 2, 4, 8, 16, 32]), dice.randrange(70_000, 90_000)
        # the system counts a user's processes and threads, and not those of root
        other = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *READS_ALL] if is_root else []
        before = [*other, "prlimit", f"--nproc={number}"]
        return Fault(f"ulimit -u {number}", STARVE, PROCESSES, (signal.SIGABRT, signal.SIGSEGV), before=before)
    return Fault("one core", STARVE, is_right=True, cores=1)
