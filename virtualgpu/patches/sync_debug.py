"""torch.cuda.set_sync_debug_mode: a warning or an error where the host has to wait for a GPU to go on.

As in PyTorch, what asks for waiting by its name stays without a word: torch.cuda.synchronize and Event.synchronize.
"""

import sys
import warnings

import torch

from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches

WARN, ERROR = 1, 2
MESSAGE = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


def install(machine: Machine, patches: Patches) -> None:
    """Add the two C functions behind it; the clock's `wait_for` is another one only while a mode is on."""
    clock, mode, told = machine.clock, 0, False

    def wait_for(queue) -> None:
        if mode == ERROR:
            raise RuntimeError(MESSAGE)
        _warn(MESSAGE)
        type(clock).wait_for(clock, queue)

    def set_mode(chosen: int) -> None:
        nonlocal mode, told
        if not told:
            told = True
            _warn(PROTOTYPE)
        mode = chosen
        if mode:
            clock.wait_for = wait_for
        else:
            vars(clock).pop("wait_for", None)

    patches.add(torch._C, "_cuda_get_sync_debug_mode", lambda: mode)
    patches.add(torch._C, "_cuda_set_sync_debug_mode", set_mode)


def _warn(message: str) -> None:
    """At the line of the program, as from C++: once a line, unless the program's filters say otherwise."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("virtualgpu.", "torch.")):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
