"""Ranks that `launch` starts work on the notebook's virtual GPUs: what they take over, and what comes back. `variables` is for
processes that somebody else starts, such as Ray.

They have the same cards, and share their memory through one ledger, as processes on real GPUs do. Where the notebook records
(a Timeline, recording()), what each rank's GPU did is put into its recording.
"""

import atexit
import os
import pickle
from dataclasses import replace

from virtualgpu import environment, scratch
from virtualgpu.environment import Card, Settings
from virtualgpu.memory.ledger import Ledger
from virtualgpu.run import launcher, results


def export_state(dry: bool) -> bytes | None:
    """What ranks take over from this process; None where it has no virtual GPUs of its own.

    Raises ValueError where a dry run is asked for and there are none.
    """
    machine = _machine()
    if machine is None:
        if dry:
            raise ValueError("launch(dry=True) runs on shapes alone, which virtual GPUs can: call gpus() first")
        return None
    from virtualgpu import session

    _open_ledger(machine)
    clock = machine.clock
    clock.wait()
    cards = (machine.specs, machine.visible, machine.settings)
    flags = (dry or machine.dry, clock.spans is not None, session.looks_for_races(), session.timers_of_others())
    return pickle.dumps((cards, flags, machine.ledger.folder, _of_nccl()))


def variables() -> dict[str, str]:
    """What to set in the environment of a program started now (Ray's, a script's) so that it, and whatever it starts, has this
    process's virtual GPUs and shares their memory. Empty where there are none, and under the runner, which has set it.

    Raises ValueError for a card that is in no table: a program looks its cards up by name.
    """
    from virtualgpu import session
    from virtualgpu.hardware.specs import find_spec

    machine = _machine()
    if machine is None or session.of_the_runner():
        return {}
    for spec in machine.specs:
        if find_spec(spec.name, spec.memory) != spec:
            raise ValueError(f"{spec.name} is a card of your own, which other programs cannot look up by its name")
    _open_ledger(machine)
    cards = tuple(Card(spec.name, spec.name, spec.memory, tuple(spec.capability)) for spec in machine.specs)
    settings = vars(machine.settings) | {"network": machine.settings.network and machine.settings.network.name}
    settings = Settings(
        cards,
        machine.dry,
        machine.ledger.folder,
        sanitize=session.looks_for_races(),
        timers=session.timers_of_others(),
        **settings,
    )
    return launcher.variables(settings, dict(os.environ))


def import_state(offered: bytes | None) -> None:
    """In a rank: the notebook's GPUs are on."""
    if offered is None:
        return
    from virtualgpu import _compat, session

    (specs, visible, settings), (dry, recording, sanitize, timers), folder, variables = pickle.loads(offered)
    _compat.hide_real_gpus()
    session.look_for_races(sanitize)
    session.timers(timers)
    for name in _of_nccl():  # the forkserver's, which has the notebook's environment as it was at its first launch
        del os.environ[name]
    os.environ.update(variables)
    machine = _machine()
    if machine is not None and (machine.ledger is None or machine.ledger.folder != folder):
        session.deactivate()  # the runner's, in whose place the notebook has others, with a memory of their own: of the same cards, too
        machine = None
    if machine is None:
        machine = session.turn_on(specs, visible, settings=settings).machine
        machine.share(Ledger(folder, len(specs)))
    machine.be_dry(dry)
    if recording:
        machine.clock.record([])


def export_trace(offered: bytes | None) -> bytes | None:
    """In a rank, at its end: what its GPUs did."""
    machine = _machine() if offered is not None else None
    if machine is None or machine.clock.spans is None:
        return None
    machine.clock.wait()
    settings = environment.settings()
    if settings is not None and settings.trace:  # under the runner
        results.leave(settings.folder or "", results.LEFT, [])  # the process that launched it has its spans
    return pickle.dumps((machine.clock.latest(), machine.clock.spans))


def merge_traces(traces: list[bytes | None]) -> None:
    """In the notebook: the ranks began when it started them, and it has waited for the last."""
    machine = _machine()
    if machine is None or machine.clock.spans is None:
        return
    clock = machine.clock
    begin = end = clock.host
    for what in traces:
        if what is not None:
            last, spans = pickle.loads(what)
            end = max(end, begin + last)
            clock.spans.extend(replace(span, start=begin + span.start, end=begin + span.end) for span in spans)
    clock.wait_until(end)


def _open_ledger(machine) -> None:
    """From here on, what this process holds of its GPUs is written where others can read it; a dry run's cache is nothing that it holds."""
    if machine.cached_by_dry_run:
        machine.leaves_cached(False)
        for gpu in machine.gpus:
            with gpu.only() as memory:
                memory.empty_cache()
    if machine.ledger is None:
        folder = scratch.folder()
        atexit.register(scratch.remove, folder)
        machine.share(Ledger(folder, len(machine.specs)))
        for gpu in machine.gpus:
            memory = gpu.settled()
            if memory.peak_reserved:  # of a GPU that it never used a process has no context
                gpu.note(machine.ledger, memory)


def _of_nccl() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def _machine():
    from virtualgpu import session  # not before it is needed: it brings torch

    return session.current()
