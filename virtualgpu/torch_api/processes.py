"""Virtual GPUs in other processes and threads: tensors sent to them, loaders' workers, and threads that begin."""

import concurrent.futures.thread
import ctypes
import sys
import threading
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.parallel import parallel_apply

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine, dry_runs
from virtualgpu.engine.storage import gpu_of
from virtualgpu.engine.values import known_of
from virtualgpu.torch_api.moves import refuse_to_share
from virtualgpu.torch_api.patches import Patches, standing_in

# -- Tensors of the CPU that a dry run sends to another process, by a queue or from a loader's worker: a small one with its numbers, as
# far as they are known, any other as a shape. A GPU's tensor is refused.


def _install_sending(machine: Machine, patches: Patches) -> None:
    def register(reduce) -> None:
        for kind in (torch.Tensor, torch.nn.Parameter):
            ForkingPickler.register(kind, reduce)

    register(standing_in(reduce_tensor, _reduce, machine))
    patches.undo(lambda: register(reduce_tensor))
    patches.stand_in(torch.UntypedStorage, "share_memory_", _share)
    patches.wrap(torch.UntypedStorage, "_new_shared", lambda original: staticmethod(standing_in(original, _new_shared)))
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        patches.stand_in(torch.UntypedStorage, name, _untracked, machine)


# multiprocessing.Queue pickles in this thread, which drops what fails there, and who waits for it waits for ever: he gets the error
FEEDER = "QueueFeederThread"


def _reduce(machine: Machine, original, tensor: torch.Tensor):
    if gpu_of(tensor) is not None and threading.current_thread().name == FEEDER:
        return refuse_to_share, ()
    if not _compat.is_really_meta(tensor) or gpu_of(tensor) is not None or not tensor.is_leaf:
        return original(tensor)
    with machine.untracked():
        values = known_of(tensor)
        if values is None:
            return original(tensor)
        values = values.detach().requires_grad_(tensor.requires_grad)
        return original(
            torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values
        )


def _share(original, storage):
    """What has no values has none to share."""
    return storage if _compat.real_storage_device(storage).type == "meta" else original(storage)


def _new_shared(original, size: int, *, device="cpu"):
    """Nor to be shared: a loader's batch. PyTorch 2.11 makes it on the CPU, where no shape of it can lie."""
    if torch.device(device).type == "meta":
        return torch.UntypedStorage(size, device="meta")
    return original(size, device=device)


def _untracked(machine: Machine, original, storage, *args, **kwargs):
    """C++ copies the numbers by operations, which a dry run would take for the program's."""
    with machine.untracked():
        return original(storage, *args, **kwargs)


# -- torch.utils.data: what a DataLoader's worker makes has values, in a dry run as well, however the worker was started.


def _run_loader_worker(machine: Machine, original, *args):
    machine.be_dry(False)
    with dry_runs.set_here(None):
        return original(*args)


# -- Threads see the virtual GPUs too. A dispatch mode belongs to one thread, and so does simulated time.
#
# A thread that is started while they are on sees them from its first line, and its time goes on from who started it; in a dry run it is
# in that, too, and so is what a dry run submits to a pool. The main thread and the workers
# of a pool see them also where they are older. Any other thread that is older meets them as soon as it moves a tensor to a GPU, or calls
# torch.cuda; what it computes before, with tensors that others gave it, passes unseen.


def _install_threads(machine: Machine, patches: Patches) -> None:
    item = concurrent.futures.thread._WorkItem
    patches.stand_in_everywhere(sys.modules[parallel_apply.__module__], "parallel_apply", _apply_in_parallel, machine)
    patches.stand_in(threading.Thread, "start", _start_thread, machine)
    patches.stand_in(threading.Thread, "join", _join_thread, machine)
    patches.stand_in(item, "__init__", _submit_to_pool)
    patches.stand_in(item, "run", _run_in_pool, machine)  # a pool's worker that was there before


def _start_thread(machine: Machine, original, thread) -> None:
    """The thread sees the virtual GPUs from its first line on."""
    begin, now, dry = thread.run, machine.clock.host, dry_runs.here
    replicas = machine.local.replicas

    def run_on_virtual_gpus():
        if not machine.closed:
            machine.clock.local.begin(now, replicas)
            machine.enter()
        try:
            with dry_runs.set_here(dry):
                begin()
        finally:
            thread._virtual_now = machine.clock.host
            machine.leave()
            del thread.run  # it refers to the thread

    thread.run = run_on_virtual_gpus
    original(thread)


def _apply_in_parallel(machine: Machine, original, modules, *args, **kwargs):
    """nn.DataParallel's: the threads that it starts do the same at the same time."""
    with machine.local.replicating(len(modules)):
        return original(modules, *args, **kwargs)


def _join_thread(machine: Machine, original, thread, timeout=None) -> None:
    """Who joins a thread has waited for its simulated time."""
    original(thread, timeout)
    if not thread.is_alive() and hasattr(thread, "_virtual_now"):
        machine.clock.inherit(thread._virtual_now)


def _submit_to_pool(original, item, *args, **kwargs) -> None:
    """What a dry run submits is in that dry run."""
    original(item, *args, **kwargs)
    item._virtual_dry = dry_runs.here


def _run_in_pool(machine: Machine, original, item):
    """A worker that is older than the virtual GPUs sees them meanwhile."""
    older = machine.local.seen is not machine and not machine.closed
    if older:
        machine.enter()
    try:
        with dry_runs.set_here(getattr(item, "_virtual_dry", dry_runs.here)):
            return original(item)
    finally:
        if older:
            machine.leave()


def tell_main_thread(function) -> None:
    """Let the main thread call `function` at its next step, if this is another one."""
    if threading.current_thread() is threading.main_thread():
        return

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def call(_):
        _waiting.remove(call)
        function()
        return 0

    _waiting.append(call)
    ctypes.pythonapi.Py_AddPendingCall(call, None)


_waiting: list = []  # they must outlive this call


def install(machine: Machine, patches: Patches) -> None:
    """All of this file's stand-ins."""
    _install_sending(machine, patches)
    _install_threads(machine, patches)
    patches.stand_in(_compat.loader_workers(), _compat.WORKER_LOOP, _run_loader_worker, machine)
