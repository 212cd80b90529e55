"""What the runner does inside each process of the program: virtual GPUs on after `import torch`, figures left at the end."""

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import util

from virtualgpu import environment
from virtualgpu.memory.ledger import Ledger


class _Process:
    """This process's part of the run. leaves: what it leaves in the run's folder, by name. `finish` may be called several times."""

    def __init__(self, settings: environment.Settings, folder: str):
        self.settings, self.folder, self.ledger = settings, folder, Ledger(folder, len(settings.cards))
        self.leaves: dict[str, Callable[[str], None]] = {}
        machine = activate(settings, self.ledger)
        self.record()
        self.watch(machine)
        atexit.register(self.finish)
        util.register_after_fork(self, _Process.forked)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.record)  # what the parent's GPUs did is the parent's to tell

    def record(self) -> None:
        """For --trace."""
        if self.settings.trace:
            from virtualgpu.run import results
            from virtualgpu.session import blocks

            self.recording = blocks.recording()  # it ends where nobody holds it
            spans = self.recording.__enter__()
            self.leaves["trace"] = lambda folder: spans.save(results.path(folder, results.LEFT))

    def watch(self, machine) -> None:
        """For --report: what lies on the GPUs at their peak; for fit: the optimizer's steps; else: what to say of an out of memory."""
        settings = self.settings
        if settings.report:
            from virtualgpu.run import peaks, report

            watched = peaks.Peaks(machine)
            self.leaves["report"] = lambda folder: report.leave(folder, watched.peaks())
        if settings.steps is not None:
            from virtualgpu.run import steps

            if settings.explain is None:
                self.leaves["steps"] = steps.Watch(machine, settings.steps, steps.Rows()).leave
            else:
                from virtualgpu.run.explain import watch

                self.leaves["steps"] = watch.Watch(machine, settings.steps, settings.explain, self.folder).leave
        elif not settings.report:
            from virtualgpu.run import peaks

            peaks.explain_uncaught(machine)

    def forked(self) -> None:
        """In a process forked by multiprocessing, which ends without atexit: its finalizers run instead."""
        util.Finalize(None, self.finish, exitpriority=0)

    def finish(self) -> None:
        """Last figures, the trace, the report; or a word on why the runner will not find one."""
        from virtualgpu import session

        machine = session.current()
        if machine is not None and machine.gpus and machine.initialized and not machine.forked:
            _last_figures(machine, self.ledger)
        for what, leave in self.leaves.items():
            try:
                leave(self.folder)
            except FileNotFoundError:
                pass  # the runner, and its folder with it, has gone: nobody asks
            except OSError as error:
                if sys.stderr is not None:
                    print(f"virtualgpu: the {what} of process {os.getpid()} was not written: {error}", file=sys.stderr)
        self.ledger.end()


_started = False


def start() -> None:
    """Virtual GPUs on, as VIRTUALGPU says. Does nothing the second time (torch may be reloaded). Ends the program where PyTorch is not
    one that they work with."""
    try:
        _start()
    except environment.UnsupportedPyTorch as error:
        sys.exit(f"virtualgpu: {error}")


def _start() -> None:
    global _started
    settings = environment.settings()
    if _started or settings is None:
        return
    _started = True
    from virtualgpu import _compat

    _compat.hide_real_gpus()
    if sys.platform == "linux":
        from virtualgpu.run import prefork

        prefork.SpawnServer().install()
    if settings.folder:
        _Process(settings, settings.folder)
    else:
        activate(settings)


def activate(settings: environment.Settings, ledger: Ledger | None = None):
    """The cards of `settings` that CUDA_VISIBLE_DEVICES leaves, as if they were real ones. Returns the machine."""
    from virtualgpu import session
    from virtualgpu.hardware import specs

    cards = [specs.find_spec(card.like, card.memory) for card in settings.cards]
    if settings.explain:
        from virtualgpu.run.explain import watch

        cards = watch.cards(settings.explain, cards)
    machine = session.activate(
        cards,
        settings.dry,
        settings.gpus_per_node,
        settings.network,
        settings.sanitize,
        settings.clock,
        settings.host,
        settings.timers,
    )
    if settings.single_rank is not None:
        from virtualgpu.distributed import topology

        topology.enter(machine, topology.RankConfig.checked(*settings.single_rank))
    if ledger is not None:
        machine.share(ledger)
    return machine


def _last_figures(machine, ledger: Ledger) -> None:
    """What this process's GPUs came to, for those that it used."""
    communicators = machine.communicators
    if communicators is not None and communicators.statistics.count:
        ledger.communicate(communicators.statistics.total())
    now = machine.clock.latest()
    for gpu in machine.gpus:
        memory, busy = gpu.settled(), machine.clock.busy[gpu.index]
        computing = machine.clock.computing[gpu.index]
        if memory.peak_reserved or busy:
            ledger.note(gpu.physical, memory.reserved + memory.context, memory.peak_allocated, memory.peak_reserved)
            ledger.time(gpu.physical, busy, now, computing)
