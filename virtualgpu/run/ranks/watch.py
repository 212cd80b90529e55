"""A launch as the notebook sees it: each rank, who failed first, and where each one stands."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from virtualgpu.run import launcher
from virtualgpu.run.processes import kill_tree
from virtualgpu.run.ranks import forkserver, worker
from virtualgpu.run.ranks.worker import ASK
from virtualgpu.run.report import OURS, is_the_programs

# -- One rank of a launch, as the notebook sees it.

_starting = threading.Lock()


class Rank:
    """One process, as the parent sees it. state: starting, running the reader's function, or returned from it.

    stacks, output: files for where it stands, and for what C++ writes.
    """

    def __init__(self, index: int, folder: Path):
        self.index, self.stacks, self.output = index, folder / f"{index}.stacks", folder / f"{index}.output"
        self.state = "starting"
        self.result: bytes | None = None
        self.trace: bytes | None = None  # what its GPUs did
        self.error: tuple[float, str] | None = None  # when (monotonic: one clock for all processes), and the traceback
        self.process: Any = None

    def start(self, world_size: int, port: int, payload: bytes) -> None:
        """Start the process. payload: what `worker` reads from the pipe."""
        context = forkserver.context()
        self.pipe, child_pipe = context.Pipe()
        printed, child_stdout = context.Pipe(duplex=False)
        self.printed = worker.Printed(printed)
        arguments = (child_pipe, child_stdout, self.index, world_size, port, str(self.stacks), str(self.output))
        self.process = context.Process(target=worker.work, args=arguments, name=f"rank {self.index}", daemon=True)
        with _starting, _no_main_module(), forkserver.in_a_group_of_its_own():
            try:
                self.process.start()
            except (EOFError, ConnectionError):  # what ranks are forked from has just died (out of memory, say)
                time.sleep(0.2)  # until the system knows that, and a new one is started
                self.process.start()
        child_pipe.close()
        child_stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(payload)

    @property
    def done(self) -> bool:
        """Has it returned, and said what?"""
        return self.result is not None

    def sources(self) -> list:
        """What to wait for."""
        printed = [] if self.printed.ended else [self.printed.pipe]
        return [self.pipe, self.process.sentinel, *printed]

    def read(self) -> None:
        """Take in what it has sent."""
        self.printed.read()
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                setattr(self, *self.pipe.recv())  # state, result or error

    def lines(self) -> list[str]:
        """What it printed."""
        return self.printed.lines() if self.process is not None else []

    def end(self) -> None:
        """End the process, and whatever it started."""
        if self.process is None:
            return
        if self.process.pid is not None:  # None: interrupted while it was being started; the closed pipe ends it
            kill_tree(self.process.pid)
            self.process.kill()
            self.process.join()
            self.read()
        self.pipe.close()
        self.printed.pipe.close()


@contextlib.contextmanager
def _no_main_module():
    """multiprocessing would run a script's file again in each process; the function travels by itself."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update({"__spec__": None, **hidden})


# -- Watching ranks: until all are done, one fails, or the time is up. Who was first, and where each one stands.


GRACE = 0.3  # seconds in which a process that died may still be found before a survivor is blamed
LONGEST = 3600.0  # seconds of one wait: the system's own limit is some weeks
START = 120.0  # seconds in which ranks must have begun: from a cold disk PyTorch alone may take a minute
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


class WorkerError(RuntimeError):
    """A rank failed; `rank` says which was first. After a timeout it is None, and `places` says where each rank
    stood."""

    def __init__(self, rank: int | None, message: str, places: list[str] | None = None):
        super().__init__(message)
        self.rank, self.places = rank, places or []


def until_done(ranks: list[Rank], timeout: float) -> None:
    """Wait for every rank. Raises WorkerError for the first that fails, or `timeout` seconds after the last of them began."""
    begun, since = False, time.monotonic()
    while not all(rank.done for rank in ranks):
        if not begun and all(rank.state != "starting" for rank in ranks):
            begun, since = True, time.monotonic()
        limit = timeout if begun else max(START, timeout)
        left = since + limit - time.monotonic()
        if left <= 0:
            late = f"not done after {limit:g} s (the timeout)" if begun else f"not begun after {limit:g} s"
            places = where(ranks)
            raise WorkerError(None, "\n  ".join([f"{late}. Where each rank stood:", *places]), places)
        wait([source for rank in ranks if not rank.done for source in rank.sources()], timeout=min(left, LONGEST))
        for rank in ranks:
            rank.read()
        if any(rank.error or died(rank) for rank in ranks):
            _raise_first_failure(ranks)


def _raise_first_failure(ranks: list[Rank]) -> None:
    """A process that died comes before those that miss it; among those that raised, the first."""
    time.sleep(GRACE)
    for rank in ranks:
        rank.read()
    for rank in ranks:
        if how := died(rank):
            raise WorkerError(rank.index, f"rank {rank.index} {how}")
    (_, what), index = min((rank.error, rank.index) for rank in ranks if rank.error)
    raise WorkerError(index, f"rank {index} failed first:\n{what}")


def died(rank: Rank) -> str | None:
    """How it ended, if it ended without a word."""
    code = rank.process.exitcode
    if rank.done or rank.error or code is None:
        return None
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        how = f"was killed by {name}" + (" (out of memory on this machine, perhaps)" if name == "SIGKILL" else "")
    else:
        how = f"exited with status {code} before it was done"
    output = rank.output.read_text("utf-8", "replace").strip() if rank.output.exists() else ""
    return how + (f"{launcher.cure(output)}. Its last words:\n{output[-2000:]}" if output else "")


def where(ranks: list[Rank]) -> list[str]:
    """Of each rank, the line of the reader's code that it stands in, asked of the running process."""
    running = [rank for rank in ranks if rank.state != "starting" and not rank.done and rank.process.exitcode is None]
    if ASK:
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, ASK)
        time.sleep(GRACE)
    return [f"rank {rank.index} {_stands(rank) if rank in running else _is(rank)}" for rank in ranks]


def _is(rank: Rank) -> str:
    return "is still starting" if rank.process.exitcode is None and not rank.done else "has ended"


def _stands(rank: Rank) -> str:
    frames = frames_of(rank.stacks.read_text("ascii", "replace") if rank.stacks.exists() else "")
    if not frames:
        return "does not answer"
    end = next((index for index, (file, _, _) in enumerate(frames) if file.startswith(HERE)), len(frames))
    called = [frame for frame in frames[:end] if not frame[0].startswith(OURS)]  # recv waits, not our part of it
    own = [frame for frame in called if is_the_programs(frame[0])]
    innermost = (called or frames)[0][2]
    if own:
        _, line, name = own[0]
        return f"stands in line {line}, in {name}" + (f", which waits in {innermost}" if innermost != name else "")
    return "is done, and waits for the others" if rank.state == "returned" else f"waits in {innermost}"


def frames_of(dump: str) -> list[tuple[str, str, str]]:
    """File, line and function of each frame that faulthandler wrote, innermost first; what is not ASCII it wrote as \\u escapes."""
    text = dump.encode("ascii", "backslashreplace").decode("unicode_escape")
    return re.findall(r'File "(.*)", line (\d+) in (.*)', text)
