"""Programs that `fit` and `--explain` try: side by side, and none of them left at the end, also where this process is killed."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from virtualgpu.run import cli
from virtualgpu.run.prefork import ScriptServer
from virtualgpu.run.processes import Warden, kill_tree

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
            status = self.run(cli.command(list(command), environ.get("PATH")), dict(environ), file, limit)
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
