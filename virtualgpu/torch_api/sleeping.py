"""time.sleep: a host that sleeps launches nothing, so the pause passes on the simulated clock as well.

Only where the main thread sleeps by a line of the program. A library's sleep waits for something that happens on this machine (a process, a
file, an answer), and a thread that watches the program would hand the time that it really took on to who joins it.
"""

import contextlib
import os
import sys
import sysconfig
import threading
import time

from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches

# .here: the sleep of this thread is part of what is measured on this machine, and passes by that
measured = threading.local()
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def install(machine: Machine, patches: Patches) -> None:
    """Replace time.sleep."""
    patches.stand_in_everywhere(time, "sleep", _sleep, machine)


@contextlib.contextmanager
def measuring():
    """Inside, a sleep passes nothing: who measures lets that pass, the sleep included."""
    before, measured.here = getattr(measured, "here", False), True
    try:
        yield
    finally:
        measured.here = before


def _sleep(machine: Machine, original, seconds) -> None:
    original(seconds)
    caller = sys._getframe(2)  # below this function and what stands in for sleep
    main = threading.current_thread() is threading.main_thread()
    if main and not getattr(measured, "here", False) and _is_the_programs(caller):
        machine.clock.wait_until(machine.clock.host + seconds)


def _is_the_programs(frame) -> bool:
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("virtualgpu.", "torch.")) and not frame.f_code.co_filename.startswith(LIBRARIES)
