"""torch.cuda.set_sync_debug_mode: a warning or an error where the host has to wait for a GPU to go on.

As in PyTorch, what asks for waiting by its name stays without a word: torch.cuda.synchronize and Event.synchronize.
"""

from virtualgpu import _compat
from virtualgpu.engine.frames import warn_at_the_program
from virtualgpu.engine.machine import Machine
from virtualgpu.timing.clock import Clock, Queue
from virtualgpu.torch_api.registry import Patches

WARN, ERROR = 1, 2
MESSAGE = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


def install(machine: Machine, patches: Patches) -> None:
    """Add the two C functions behind it."""
    debug = SyncDebug(machine.clock)
    patches.add(_compat.C, "_cuda_get_sync_debug_mode", lambda: debug.mode)
    patches.add(_compat.C, "_cuda_set_sync_debug_mode", debug.set_mode)


class SyncDebug:
    """The mode; the clock's `wait_for` is another one only while it is on."""

    def __init__(self, clock: Clock):
        self.clock, self.mode, self.warned = clock, 0, False

    def set_mode(self, mode: int) -> None:
        """0: nothing; WARN or ERROR."""
        if not self.warned:
            self.warned = True
            warn_at_the_program(PROTOTYPE)
        self.mode = mode
        if mode:
            self.clock.wait_for = self.wait_for
        else:
            vars(self.clock).pop("wait_for", None)

    def wait_for(self, queue: Queue) -> None:
        """Clock.wait_for, with a word."""
        if self.mode == ERROR:
            raise RuntimeError(MESSAGE)
        warn_at_the_program(MESSAGE)
        type(self.clock).wait_for(self.clock, queue)
