"""What a program does on the CPU by itself, on the simulated clock; and what its stopwatches read."""

import contextlib
import os
import sys
import sysconfig
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

from virtualgpu.engine.frames import warn_at_the_program
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.patches import Patches

# -- What a program does on the CPU, outside of PyTorch's work on GPUs: on the simulated clock it takes as long as a processor works on it.
#
# It is measured on this machine, once the program has read a stopwatch; before that the clock depends on nothing
# that this machine does. What a processor works on, not what passes: ranks that share two cores here have one each where they would run, and who
# waits for another rank, a worker or a disk does not work.

SHORT = 2e-3  # seconds between two operations that are PyTorch's own (a module, the end of a backward pass), which the host's time (timing/host.py) has already


class OwnWork(threading.local):
    """One thread's. `enter` and `leave` stand around all that is ours, an operation on a GPU above all: what a processor worked between them is the
    program's, and goes to `spend`. within: in how many of these the thread is. aside: seconds that a thread beside the main one worked or slept,
    which are no host's. launched: has the thread used a GPU?
    """

    def __init__(self, spend: Callable[[float], None], moment: Callable[[], tuple[float, bool]]):
        """moment: the host's time, and is the thread in a backward pass or an optimizer's step? From one such moment to the next PyTorch works."""
        self.spend, self.moment = spend, moment
        self.main = threading.current_thread() is threading.main_thread()
        self.within, self.aside, self.launched = 0, 0.0, False
        self._mark()

    def _mark(self, at_a_reading: bool = False, in_pytorch: bool = False) -> None:
        """From here on it is the program's."""
        self.wall, self.worked = time.perf_counter(), time.thread_time()
        self.at_a_reading, self.in_pytorch = at_a_reading, in_pytorch

    def _end(self, short: float) -> bool:
        """What was worked since then is over. Was that long enough to pass?"""
        if time.perf_counter() - self.wall < short:
            return False
        worked = time.thread_time()
        seconds, self.worked = worked - self.worked, worked
        if seconds < short:
            return False
        self.wall = time.perf_counter()
        if self.main:
            self.spend(seconds)
        else:
            self.aside += seconds
        return True

    def enter(self) -> None:
        """Ours begins."""
        self.within += 1
        if self.within == 1:
            self.before, in_pytorch = self.moment()
            if not (in_pytorch and self.in_pytorch) and self._end(SHORT):
                self.before, _ = self.moment()

    def leave(self, surely: bool = True) -> None:
        """Ours ends. Unless that is sure: an operation that took the host no time was not on a GPU, but on the CPU, which is the program's."""
        self.within -= 1
        if not self.within:
            now, in_pytorch = self.moment()
            self.launched |= now != self.before
            if surely or in_pytorch or now != self.before:
                self._mark(in_pytorch=in_pytorch)

    __enter__ = enter

    def __exit__(self, *error) -> None:
        self.leave()

    def read(self) -> None:
        """The program reads its stopwatch: from one reading to the next, all that it worked counts."""
        if not self.within:
            self._end(0.0 if self.at_a_reading else SHORT)
            self._mark(at_a_reading=True)

    def pause(self, seconds: float) -> None:
        """The thread, which is not the main one, slept."""
        self.aside += seconds


# -- Python's time: what a program's stopwatch (time.perf_counter and its kind) reads, and what a time.sleep passes.
#
# A program that reads the time around work on GPUs means theirs: under the runner it is told the simulated time of its rank, from the moment at which its
# process uses a GPU; `timers` chooses. Who reads is seen by the line that calls: a library's limits, logs and loaders keep this machine's time, those that
# time other people's work (`STOPWATCHES`) do not. What the program works beside its GPUs passes as well: `OwnWork`.
#
# A sleep passes on the simulated clock, for a host that sleeps launches nothing, but only where the main thread sleeps by a line of the program. A
# library's sleep waits for something that happens on this machine (a process, a file, an answer), and a thread that watches the program would
# hand the time that it really took on to who joins it.


# .here: the sleep of this thread is part of what is measured on this machine, and passes by that
measured = threading.local()
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
READ = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")
# Libraries whose stopwatches time the program's work, and say so to people
NAMES = """
    timeit tqdm. torch.utils.benchmark. IPython.core.magics.execution accelerate. deepspeed. ignite. lightning. megatron.
    pytorch_lightning. timm. torchtitan. transformers."""
STOPWATCHES = tuple(NAMES.split())
NOT_OURS = ("virtualgpu.", "torch.", "helpers.")
REFRESHES = "tqdm._monitor"  # a thread that looks whether a bar has stood still for whoever sits before it
NOT_THE_GPUS_TIME = (
    "time.{}() is this machine's here, which computes what a GPU would: it does not say how long the GPUs took. "
    'virtualgpu.timers("simulated") makes it say that, and virtualgpu.timers("real") that this is meant'
)


def install(machine: Machine, patches: Patches) -> None:
    """Replace time.sleep, and what reads the time."""
    patches.stand_in_everywhere(time, "sleep", _sleep, machine)
    timers = Timers(machine)
    for name in READ:
        patches.replace_everywhere(time, name, Stopwatch(timers, getattr(time, name)))
    watch: Any = time.perf_counter
    patches.replace(timeit, "default_timer", watch)
    for function in (timeit.Timer.__init__, timeit.timeit, timeit.repeat):
        defaults = tuple(watch if value is watch.original else value for value in function.__defaults__ or ())
        patches.set(function, "__defaults__", defaults)
    machine.call_on_first_use(timers.begin)


@contextlib.contextmanager
def measuring():
    """Inside, a sleep passes nothing: who measures lets that pass, the sleep included."""
    before, measured.here = getattr(measured, "here", False), True
    try:
        yield
    finally:
        measured.here = before


_latest: dict[str, float] = {}  # what was read last, of all machines: later ones go on from there


class Timers:
    """Which time the program is told: simulated from the first use of a GPU on, which goes on from this machine's."""

    def __init__(self, machine: Machine):
        self.machine, self.clock = machine, machine.clock
        self.began: dict[str, float] | None = None
        self.read_at: tuple[float, int] | None = None  # at the last reading: the host's time, how often it had waited
        self.originals = {name: getattr(time, name) for name in READ}

    def begin(self) -> None:
        """The process uses a GPU."""
        self.zero = self.clock.host
        self.began = {name: max(now(), _latest.get(name, 0)) for name, now in self.originals.items()}

    def simulated(self, name: str) -> float | None:
        """What that function says; None: this machine's time."""
        clock = self.clock
        if clock.own is None:
            clock.measure_own_work(OwnWork)
        if self.began is None or self.machine.forked or self.machine.closed:
            return None
        clock.own.read()
        passed = clock.host - self.zero + clock.own.aside
        now = self.began[name] + (int(passed * 1e9) if name.endswith("_ns") else passed)
        latest = _latest[name] = max(now, _latest.get(name, now))
        return now if clock.own.launched or clock.own.main else latest  # who only looks on is never behind

    def warn(self, name: str) -> None:
        """Once: this is not the GPUs' time, where it is read around torch.cuda.synchronize."""
        before, self.read_at = self.read_at, (self.clock.host, self.clock.synchronized)
        if before is not None and self.read_at[0] > before[0] and self.read_at[1] > before[1]:
            self.machine.read_timers("real")
            warn_at_the_program(NOT_THE_GPUS_TIME.format(name))


class Stopwatch:
    """Stands in for a function of `time`; not a function, which as an attribute of a class would be given the instance."""

    def __init__(self, timers: Timers, original):
        self.timers, self.original = timers, original
        self.__name__, self.__qualname__, self.__doc__ = original.__name__, original.__name__, original.__doc__
        self.__module__ = "time"

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return repr(self.original)

    def __call__(self):
        """The time, of the kind that was chosen for who asks."""
        timers, now = self.timers, None
        caller = sys._getframe().f_back  # None in a library's own thread: Ray's, which collects garbage
        kind = timers.machine.timers
        if kind != "real" and caller and _is_a_stopwatch(caller):
            if kind == "simulated":
                now = timers.simulated(self.__name__)
            elif not caller.f_globals.get("__name__", "").startswith("tqdm."):  # a bar's rate is nobody's measurement
                timers.warn(self.__name__)
        return self.original() if now is None else now


def _sleep(machine: Machine, original, seconds) -> None:
    original(seconds)
    caller = sys._getframe(1).f_back  # below this function and what stands in for sleep
    if getattr(measured, "here", False) or not caller or not _is_the_programs(caller):
        return
    if threading.current_thread() is threading.main_thread():
        machine.clock.wait_until(machine.clock.host + seconds)
    elif machine.clock.own is not None:
        machine.clock.own.pause(seconds)


def _is_a_stopwatch(frame) -> bool:
    """Does a line of the program call, or one of a library that times it?"""
    name = frame.f_globals.get("__name__", "")
    return _is_the_programs(frame) or (f"{name}.".startswith(STOPWATCHES) and name != REFRESHES)


def _is_the_programs(frame) -> bool:
    """Does a line of the program call?"""
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(NOT_OURS) and not frame.f_code.co_filename.startswith(LIBRARIES)
