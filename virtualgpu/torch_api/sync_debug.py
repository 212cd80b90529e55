"""torch.cuda.set_sync_debug_mode: a warning or an error where the host has to wait for a GPU to go on.

As in PyTorch, what asks for waiting by its name stays without a word: torch.cuda.synchronize and Event.synchronize.
"""

import torch

from virtualgpu.engine.frames import warn_at_the_program
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches

WARN, ERROR = 1, 2
MESSAGE = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


def install(machine: Machine, patches: Patches) -> None:
    """Add the two C functions behind it; the clock's `wait_for` is another one only while a mode is on."""
    clock, mode, told = machine.clock, 0, False

    def wait_for(queue) -> None:
        if mode == ERROR:
            raise RuntimeError(MESSAGE)
        warn_at_the_program(MESSAGE)
        type(clock).wait_for(clock, queue)

    def set_mode(chosen: int) -> None:
        nonlocal mode, told
        if not told:
            told = True
            warn_at_the_program(PROTOTYPE)
        mode = chosen
        if mode:
            clock.wait_for = wait_for
        else:
            vars(clock).pop("wait_for", None)

    patches.add(torch._C, "_cuda_get_sync_debug_mode", lambda: mode)
    patches.add(torch._C, "_cuda_set_sync_debug_mode", set_mode)
