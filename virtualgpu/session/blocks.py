"""What virtual GPUs do differently, or keep, for as long as a block lasts: `dry_run`, `recording`, `sanitize` and `other_process`."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import torch

from virtualgpu import session
from virtualgpu.distributed import topology
from virtualgpu.engine.machine import Machine, dry_runs
from virtualgpu.hardware import machine as hardware_settings
from virtualgpu.hardware import specs
from virtualgpu.hardware.machine import MachineSettings, Network, find_network
from virtualgpu.hardware.specs import Spec, parse_size
from virtualgpu.session import check_number, current, reset, turn_on
from virtualgpu.timing.trace import Recording


@contextlib.contextmanager
def dry_run(
    n: int | None = None,
    like=None,
    memory: int | str | None = None,
    world_size: int | None = None,
    gpus_per_node: int = 8,
    rank: int = 0,
    network: str | Network | None = None,
    clock: str | None = None,
    host: str | None = None,
) -> Iterator[None]:
    """In this block, operations work on shapes alone: places, memory and time without the numbers. So they do in threads that are
    started in it, and in what it submits to a pool; other threads compute with numbers, or have dry runs of their own.

    Uses the virtual GPUs that are on, or makes some for as long as the block lasts (`n`, `like` and `memory` as in `gpus`): where none
    are on, and where it asks for others. Those that are on wait meanwhile, with what lies on them.
    Small tensors (1 KiB) that the program makes of its own numbers keep them through copies, simple arithmetic and collectives. Any other value
    read inside is nan; a warning says so once, and what was not computed. Tensors made inside have no values outside either. What they leave cached goes back
    when other processes are started on these GPUs: room that nothing fills is not kept from them.

    world_size: this process is one rank of so many, with one GPU (an H100 unless `like` says another): `init_process_group` makes
    it that. The others are taken to be like it; a collective costs what it does among all of them (`distributed.topology`), on nodes of
    `gpus_per_node`. network: what joins nodes; clock, host: how time is taken: as in `gpus`.

    Raises ValueError for an invalid number, name, size or network, or where a dry run in a dry run asks for other GPUs;
    RuntimeError where another thread's dry run has said what the other ranks are.
    """
    if n is not None:
        check_number("dry_run", n)
    where = None if world_size is None else topology.RankConfig.checked(world_size, rank, gpus_per_node)
    joined = None if network is None else find_network(network)
    settings = hardware_settings.find_settings(clock=clock, host=host)
    machine = current()
    if machine is None:
        n, like = n or (2 if where is None else 1), like or ("T4" if where is None else "H100")
        cards = specs.find_specs(n, like, memory)
    elif (n, like, memory) == (None, None, None):
        cards = machine.specs
    else:
        cards = specs.find_specs(n or len(machine.specs), like or machine.specs[0], memory)
    if machine is not None and _others_than(machine, cards, settings if (clock, host) != (None, None) else None):
        if _borrowed.blocks:
            there = ", ".join(card.name for card in machine.specs)
            raise ValueError(
                f"dry_run asks for other GPUs, or another clock, than those of the dry run that it is in ({there}): end that one first"
            )
        with session.suspended(), dry_run(n, like, memory, world_size, gpus_per_node, rank, network, clock, host):
            yield
        return
    if world_size is not None:
        specs.check([cards[0]] * min(world_size, gpus_per_node))
    with (
        _borrowed.use(cards if machine is None else None, settings),
        dry_runs.set_here(True),
        _as_one_of_many(where, joined),
    ):
        try:
            yield
        finally:
            if (machine := current()) is not None:
                machine.leaves_cached(True)


def _others_than(machine: Machine, cards: list[Spec], settings: MachineSettings | None) -> bool:
    """Does a dry run on these cards need GPUs of its own, beside those that are on?"""
    if session.machine() is None:  # they pass for real ones
        return True
    there = machine.settings.clock, machine.settings.host
    return cards != machine.specs or (settings is not None and (settings.clock, settings.host) != there)


class _Borrowed:
    """GPUs that are made for a dry run last as long as it does, and as those of other threads that use them, too."""

    def __init__(self) -> None:
        self.blocks, self.temporary, self.lock = 0, False, threading.RLock()

    @contextlib.contextmanager
    def use(self, cards: list[Spec] | None, settings: MachineSettings) -> Iterator[None]:
        """In this block there are GPUs: those that are on, or of these cards where none are."""
        with self.lock:
            if cards is not None and current() is None:
                turn_on(cards, settings=settings)
                self.temporary = True
            self.blocks += 1
            session.meet()
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if self.temporary and not self.blocks:
                    self.temporary = False
                    reset()


_borrowed, _many = _Borrowed(), threading.RLock()


@contextlib.contextmanager
def _as_one_of_many(where: topology.RankConfig | None, network: Network | None) -> Iterator[None]:
    """What a dry run says of other ranks holds for the whole process."""
    if where is None and network is None:
        yield
        return
    if not _many.acquire(blocking=False):
        raise RuntimeError(
            "another thread has a dry run with world_size= or network=, which hold for the whole process: wait for its end"
        )
    machine, played = current(), None
    assert machine is not None
    before = machine.connect(network or machine.settings.network)
    try:
        played = None if where is None else topology.enter(machine, where)
        yield
    finally:
        _many.release()
        if played is not None:
            topology.leave(machine, played)
        if (still_on := current()) is not None:
            still_on.connect(before)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """A list that fills with what each virtual GPU does in this block, on the simulated clock; `save("trace.json")` writes it."""
    machine = current()
    if machine is None:
        raise RuntimeError("there are no virtual GPUs to record: call gpus() first")
    clock = machine.clock
    spans = Recording()
    before = clock.record(spans)
    try:
        yield spans
    finally:
        clock.record(before)


@contextlib.contextmanager
def sanitize() -> Iterator[None]:
    """In this block, the first race of two streams, or of a stream and the host, raises `sanitizer.UnsynchronizedAccessError`.

    Also in processes that `launch` starts in it. What was under way before the block is taken to be done. Raises RuntimeError where there
    are no virtual GPUs.
    """
    if current() is None:
        raise RuntimeError("there are no virtual GPUs on which to look for races: call gpus() first")
    before = session.look_for_races(True)
    try:
        yield
    finally:
        session.look_for_races(before)


@contextlib.contextmanager
def other_process(leave: int | str, device: int = 0, container: bool = False) -> Iterator[None]:
    """In this block, another process holds all of a GPU's free memory but `leave` (bytes, or text such as "40 MB").

    Messages of OutOfMemoryError, NVML and nvidia-smi name it by a pid that no process has. container: as in a container, where pids are
    the host's, so that PyTorch does not find its own: its message says "Process N has ..." of this process too, and "this process"
    nowhere; real GPUs say what is. On real GPUs there is such a process; it ends with the block, or with this one.
    """
    nbytes, machine = parse_size(leave), session.machine()
    if machine is not None:
        with machine.gpus[device].leaving(nbytes, container):
            yield
        return
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(device), str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            if not child.stdout.readline():
                raise RuntimeError(f"the other process found no room on {torch.cuda.get_device_name(device)}")
            yield
        finally:
            child.stdin.close()


_HOLD = """
import sys, torch
device, leave = map(int, sys.argv[1:])
held = torch.empty(max(0, torch.cuda.mem_get_info(device)[0] - leave), dtype=torch.uint8, device=device)
print(held.nbytes, flush=True)
sys.stdin.read()
"""
