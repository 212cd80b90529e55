"""Threads see the virtual GPUs too. A dispatch mode belongs to one thread, and so does simulated time.

A thread that is started while they are on sees them from its first line, and its time goes on from who started it; in a dry run it is
in that, too, and so is what a dry run submits to a pool. The main thread and the workers
of a pool see them also where they are older. Any other thread that is older meets them as soon as it moves a tensor to a GPU, or calls
torch.cuda; what it computes before, with tensors that others gave it, passes unseen.
"""

import concurrent.futures.thread
import ctypes
import sys
import threading

from torch.nn.parallel import parallel_apply

from virtualgpu.engine.machine import Machine
from virtualgpu.engine.thread_context import dry_runs
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace Thread.start and Thread.join, and what a worker of concurrent.futures runs."""
    work = concurrent.futures.thread._WorkItem
    patches.stand_in_everywhere(sys.modules[parallel_apply.__module__], "parallel_apply", apply, machine)
    patches.stand_in(threading.Thread, "start", start, machine)
    patches.stand_in(threading.Thread, "join", join, machine)
    patches.stand_in(work, "__init__", submit)
    patches.stand_in(work, "run", run, machine)  # a pool's worker that was there before


def start(machine: Machine, original, thread) -> None:
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


def apply(machine: Machine, original, modules, *args, **kwargs):
    """nn.DataParallel's: the threads that it starts do the same at the same time."""
    with machine.local.replicating(len(modules)):
        return original(modules, *args, **kwargs)


def join(machine: Machine, original, thread, timeout=None) -> None:
    """Who joins a thread has waited for its simulated time."""
    original(thread, timeout)
    if not thread.is_alive() and hasattr(thread, "_virtual_now"):
        machine.clock.inherit(thread._virtual_now)


def submit(original, item, *args, **kwargs) -> None:
    """What a dry run submits is in that dry run."""
    original(item, *args, **kwargs)
    item._virtual_dry = dry_runs.here


def run(machine: Machine, original, item):
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
