"""One rank of a launch, as the notebook sees it."""

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from virtualgpu.run.process_tree import kill_tree
from virtualgpu.run.ranks import forkserver, output, worker

_starting = threading.Lock()


class Rank:
    """One process, as the parent sees it. state: starting, running the reader's function, or returned from it.

    stacks, words: files for where it stands, and for what C++ writes.
    """

    def __init__(self, index: int, folder: Path):
        self.index, self.stacks, self.words = index, folder / f"{index}.stacks", folder / f"{index}.words"
        self.state = "starting"
        self.result: bytes | None = None
        self.left: bytes | None = None  # what its GPUs did
        self.error: tuple[float, str] | None = None  # when (monotonic: one clock for all processes), and the traceback
        self.process: Any = None

    def start(self, world_size: int, port: int, payload: bytes) -> None:
        """Start the process. payload: what `worker` reads from the pipe."""
        context = forkserver.context()
        self.pipe, child_pipe = context.Pipe()
        printed, child_stdout = context.Pipe(duplex=False)
        self.printed = output.Printed(printed)
        arguments = (child_pipe, child_stdout, self.index, world_size, port, str(self.stacks), str(self.words))
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
