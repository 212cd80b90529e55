"""What the runner does inside each process of the program: virtual GPUs on after `import torch`, figures left at the end."""

import atexit
import os
import sys
from multiprocessing import util

from virtualgpu import environment
from virtualgpu.memory.ledger import Ledger


class _Process:
    """This process's part of the run. `finish` may be called several times."""

    def __init__(self, settings: environment.Settings):
        self.settings, self.recorded, self.recording = settings, None, None
        self.steps = self.peaks = None
        self.ledger = Ledger(settings.folder, len(settings.cards)) if settings.folder else None

    def start(self) -> None:
        from virtualgpu import _compat

        _compat.hide_real_gpus()
        activate(self.settings, self.ledger)
        if self.settings.folder:
            self.record()
            self.watch()
            atexit.register(self.finish)
            util.register_after_fork(self, _Process.forked)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.record)  # what the parent's GPUs did is the parent's to tell

    def record(self) -> None:
        if self.settings.trace:
            from virtualgpu import blocks

            self.recording = blocks.recording()
            self.recorded = self.recording.__enter__()

    def watch(self) -> None:
        """For --report: what lies on the GPUs at their peak; for fit: the optimizer's steps; else: what to say of an out of memory."""
        from virtualgpu import session

        machine = session.current()
        if self.settings.report:
            from virtualgpu.run.peaks import Peaks

            self.peaks = Peaks(machine)
        if self.settings.explain is not None:
            from virtualgpu.run.explain import watch

            settings = self.settings
            self.steps = watch.Watch(machine, settings.steps, settings.explain, settings.folder)
        elif self.settings.steps is not None:
            from virtualgpu.run.trials import rows, steps

            self.steps = steps.Watch(machine, self.settings.steps, rows.Rows())
        elif not self.settings.report:
            from virtualgpu.run import out_of_memory

            out_of_memory.explain_uncaught(machine)

    def forked(self) -> None:
        """In a process forked by multiprocessing, which ends without atexit: its finalizers run instead."""
        util.Finalize(None, self.finish, exitpriority=0)

    def finish(self) -> None:
        """Last figures, the trace, the report."""
        from virtualgpu import session

        machine = session.current()
        if machine is not None and machine.gpus and machine.initialized and not machine.forked:
            _last_figures(machine, self.ledger)
        if self.recorded:
            from virtualgpu.run import traces

            path = os.path.join(self.settings.folder, f"{os.getpid()}{traces.SUFFIX}")
            _left("trace", self.recorded.save, path)
        if self.peaks is not None:
            from virtualgpu.run import report

            _left("report", lambda folder: report.leave(folder, self.peaks.peaks()), self.settings.folder)
        if self.steps is not None:
            _left("steps", self.steps.leave, self.settings.folder)
        self.ledger.end()


def _left(what: str, leave, where: str) -> None:
    """What the runner is to find, or a word on why it will not."""
    try:
        leave(where)
    except FileNotFoundError:
        pass  # the runner, and its folder with it, has gone: nobody asks
    except OSError as error:
        if sys.stderr is not None:
            print(f"virtualgpu: the {what} of process {os.getpid()} was not written: {error}", file=sys.stderr)


_process: _Process | None = None


def start() -> None:
    """Virtual GPUs on, as VIRTUALGPU says. Does nothing the second time (torch may be reloaded)."""
    global _process
    settings = environment.settings()
    if settings is None and os.environ.get(environment.PROFILED):
        from virtualgpu.run.explain import real

        real.start()
    if _process is None and settings is not None:
        _process = _Process(settings)
        _process.start()


def activate(settings: environment.Settings, ledger: Ledger | None = None) -> None:
    """The cards of `settings` that CUDA_VISIBLE_DEVICES leaves, as if they were real ones."""
    from virtualgpu import session
    from virtualgpu.hardware import specs

    cards = [specs.find(card.like, card.memory) for card in settings.cards]
    if settings.explain:
        from virtualgpu.run.explain import changes

        cards = changes.cards(settings.explain, cards)
    machine = session.activate(
        cards, settings.dry, settings.gpus_per_node, settings.network, settings.sanitize, settings.clock, settings.host
    )
    if settings.single_rank is not None:
        from virtualgpu.distributed import rank_config

        rank_config.enter(machine, rank_config.make(*settings.single_rank))
    if ledger is not None:
        machine.share(ledger)


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
