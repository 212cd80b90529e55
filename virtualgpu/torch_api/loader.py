"""torch.utils.data: what a DataLoader's worker makes has values, in a dry run as well, however the worker was started."""

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.thread_context import dry_runs
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace what a worker does from its beginning to its end."""
    patches.stand_in(_compat.loader_workers(), _compat.WORKER_LOOP, work, machine)


def work(machine: Machine, original, *args):
    """The process is a worker's."""
    machine.be_dry(False)
    with dry_runs.set_here(None):
        return original(*args)
