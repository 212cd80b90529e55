"""What a program does on the CPU, outside of PyTorch's work on GPUs: on the simulated clock it takes as long as a processor works on it.

It is measured on this machine, once the program has read a stopwatch (python_time.py); before that the clock depends on nothing
that this machine does. What a processor works on, not what passes: ranks that share two cores here have one each where they would run, and who
waits for another rank, a worker or a disk does not work.
"""

import threading
import time
from collections.abc import Callable

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
