"""What `fit` and `--explain` share: programs side by side, none of them left at the end, also where this process is killed; the steps that they made
(`steps` counts them), what they printed, and how far the trials are."""

import contextlib
import errno
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple

from virtualgpu.environment import DRY_HAS_NO_VALUES
from virtualgpu.run import launcher, results
from virtualgpu.run.prefork import ScriptServer
from virtualgpu.run.processes import Warden, kill_tree
from virtualgpu.run.report import is_the_programs, size

LAUNCHER = re.compile(r"(^|/)(torchrun|accelerate|deepspeed)$|^torch\.distributed\.(run|launch)$")
ROOM = 2 << 30  # bytes of this machine's memory that a trial may take: PyTorch, and a model's shapes


def side_by_side(command: Sequence[str], gpus: Sequence[int]) -> int:
    """How many trials at a time: one a core, as far as this machine's memory goes; one, where they might meet at the same port."""
    launched = max(gpus) > 1 or any(LAUNCHER.search(word) for word in command)
    if launched and "--standalone" not in command:
        return 1
    free = None
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        free = 1024 * int(file.read().partition("MemAvailable:")[2].split()[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, (free or ROOM) // ROOM))


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """In this block SIGTERM leaves no program, as an interrupt does not: it raises SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Programs:
    """Those that run now; at the block's end, and at an interrupt, none of them is left."""

    def __init__(self):
        self._lock, self._running, self._ended = threading.Lock(), set(), False

    def __enter__(self) -> "Programs":
        self._warden, self._scripts = Warden(), ScriptServer()
        return self

    def __exit__(self, *error) -> None:
        self.end()
        self._warden.dismiss()

    def run(self, command: list[str], environ: dict[str, str], output, limit: float | None = None) -> int | None:
        """The program's exit status, once it has ended; None where it was ended after `limit` seconds. What it printed is in `output`, a file."""
        if threading.current_thread() is threading.main_thread():
            # there an interrupt could come in the midst of Popen, and leave a program that nobody knows
            return self.side_by_side(lambda _: self.run(command, environ, output, limit), [None], 1)[0]
        with self._lock:
            if self._ended:
                raise InterruptedError("the search was ended")
            child = self._scripts.start(command, environ, output) or subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(child)
            self._warden.note("begun", child.pid)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with self._lock:
                self._running.discard(child)
            kill_tree(child.pid)  # what it left behind
            child.kill()
            child.wait()
            with self._lock:
                self._warden.note("ended", child.pid)
        if self._ended:
            raise InterruptedError("the search was ended")
        return status

    def output_of(
        self, command: Sequence[str], environ: Mapping[str, str], folder: str, limit: float | None = None
    ) -> tuple[int | None, str]:
        """As `run`: the exit status, and all that the program printed, which is kept in `folder` meanwhile."""
        output = os.path.join(folder, "output")
        with open(output, "wb") as file:
            status = self.run(launcher.command(list(command), environ.get("PATH")), dict(environ), file, limit)
        with open(output, encoding="utf-8", errors="replace") as file:
            return status, file.read()

    def side_by_side(self, function: Callable, items: Iterable, jobs: int) -> list:
        """What the function, which runs programs, returns for each item: so many at a time. Raises what one of them raises, what a
        signal's handler does, and OSError where no thread can be started; then no program is left.

        The main thread wakes now and then: a signal that the system gave to another thread is handled only then.
        """
        with ThreadPoolExecutor(jobs) as pool:
            try:
                try:
                    futures = [pool.submit(function, item) for item in items]
                except RuntimeError as error:  # no thread more
                    raise OSError(errno.EAGAIN, str(error)) from None
                while True:
                    done, running = wait(futures, 0.5, FIRST_EXCEPTION)
                    for future in done:
                        future.result()  # raises what it raised
                    if not running:
                        return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.end()
                raise

    def end(self) -> None:
        """All of them are ended, with what they started, and no other begins."""
        self._scripts.end()  # nobody waits for it to be warm
        with self._lock:
            self._ended, running = True, list(self._running)
        for child in running:
            kill_tree(child.pid)
            child.kill()


# -- Optimizer steps of a program, on the simulated clock, as each of its processes left them in the runner's folder.

LEFT = "steps"


class Steps(NamedTuple):
    """One process's. ends: simulated seconds at which each step was queued and done. busy: seconds for which the busiest GPU had worked by
    then. asked: bytes that could not be had, or None. rows: shapes that went into the model in the last step, each with its calls; passes:
    backward passes of it, of which several optimizers make one (`steps.Rows`)."""

    rank: int
    ends: list[float]
    asked: int | None
    rows: Sequence[tuple[Sequence[int], int]]
    passes: int
    busy: Sequence[float] = ()

    @property
    def seconds(self) -> float | None:
        """Of a step: the median, without the first one, which has the allocator's and the optimizer's beginnings."""
        lasted = _between(self.ends)
        return statistics.median(lasted) if lasted else None

    @property
    def working(self) -> float | None:
        """The share of such a step in which the busiest GPU works."""
        worked = _between(self.busy)
        return statistics.median(worked) / self.seconds if worked and self.seconds else None


def _between(moments: Sequence[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(moments)]


def lacking(processes: Iterable[Steps], output: str) -> str:
    """What could not be had, where memory is what ended a program that left these and printed that; "" otherwise."""
    asked = [process.asked for process in processes if process.asked is not None]
    return f"{size(max(asked))} more were asked for" if asked and "OutOfMemoryError" in output else ""


def collect(folder: str) -> list[Steps]:
    """What the processes left, by rank."""
    processes = [Steps(*record) for _, record in results.collect(folder, LEFT) if record is not None]
    return sorted(processes, key=lambda process: process.rank)


# -- What a trial's program printed: the error that ended it, the lines that read a value, what the engine warned of.


READS = re.compile(rf"^(.+):(\d+): UserWarning: {DRY_HAS_NO_VALUES}", re.M)
WARNING = re.compile(r"UserWarning: (.*\bvirtual GPUs?\b.*)$", re.M)
ERROR = re.compile(r"([\w.]*(?:Error|Exception|Interrupt)\w*|[^\s:]+: error)(:.*)?$")  # or argparse's
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
RANK = re.compile(r"^\[[\w:]*rank\d+\]:\s?")
# Whoever waited for what had failed: torchrun for its processes, a rank for another one
CONSEQUENCES = re.compile(
    r"ChildFailedError|ProcessExitedException|ProcessRaisedException|DistBackendError|RendezvousConnectionError"
)


def reads(output: str) -> str:
    """The first line of the program that reads a value of the GPU, "train.py:12"; or nothing."""
    line = READS.search(output)
    return f"{os.path.basename(line[1])}:{line[2]}" if line else ""


def not_known(places: Sequence[str]) -> str:
    """A sentence on lines that read a value of the GPU."""
    decided = "so what the program decides by it may be otherwise"
    return f"{', '.join(places)} read{'s' * (len(places) == 1)} a value of the GPU: a dry run has nan there, {decided}."


def warnings(output: str) -> list[str]:
    """What the engine does otherwise than a GPU, as it said so, each once."""
    return list(dict.fromkeys(words.strip() for words in WARNING.findall(output)))


def end(status: int, output: str) -> str:
    """What a program that failed came to."""
    if -status in {number.value for number in signal.Signals}:
        killed = -status == getattr(signal, "SIGKILL", 9)
        cure = " (this machine's memory may have been too small: --jobs 1)" if killed else ""
        return f"ended by {signal.Signals(-status).name}{cure}"
    return error(output) or f"ended with status {status}"


def error(output: str) -> str:
    """What ended the program, with the program's line: the last error that is not another process's word on it; or its last line."""
    errors: list[tuple[str, str]] = []
    places: dict[str, str] = {}  # the one that each rank's traceback named last
    for line in output.splitlines():
        head = RANK.match(line)
        rank, line = (head[0], line[head.end() :]) if head else ("", line)
        if where := PLACE.search(line):
            if is_the_programs(where[1]) and not where[1].startswith("<"):
                places[rank] = f" ({os.path.basename(where[1])}:{where[2]})"
        elif line.startswith("Traceback"):
            places[rank] = ""
        elif kind := ERROR.match(line.strip()):
            errors.append((kind[1], line.strip()[:300] + places.get(rank, "")))
    causes = [words for kind, words in errors if not CONSEQUENCES.search(kind)] or [words for _, words in errors]
    return causes[-1] if causes else last_line(output)


def last_line(output: str) -> str:
    """What it printed last, if anything."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# -- While `fit` and `--explain` run: how far they are. A line on a terminal, or in a notebook's cell; gone at the end.


@contextlib.contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """What to call with the words that stand there now. Nothing is shown where TQDM_DISABLE is set, or nobody looks on."""
    if os.environ.get("TQDM_DISABLE"):
        yield lambda words: None
    elif sys.stderr is not None and sys.stderr.isatty():

        def show(words: str) -> None:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

        try:
            yield show
        finally:
            show("")
    elif (shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) and hasattr(shell, "kernel"):
        from IPython.display import display

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        try:
            yield lambda words: shown.update({"text/plain": words}, raw=True)
        finally:
            shown.update({"text/plain": ""}, raw=True)
    else:
        yield lambda words: None
