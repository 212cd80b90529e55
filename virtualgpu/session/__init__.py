"""Virtual GPUs on and off: `gpus` and `reset` for a program, `activate` for the runner, `restart` for the pytest plugin.

Here is which GPUs are on, what stands in for PyTorch's while they are, put in place and taken out again as a whole, and what `gpus` returns and
says; `blocks` has what holds for as long as a with block lasts.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from virtualgpu.environment import MAX_GPUS, names_of_pytorch, visible_gpus
from virtualgpu.hardware import machine as hardware_settings
from virtualgpu.hardware import specs
from virtualgpu.hardware.machine import DATASHEET, MachineSettings, Network
from virtualgpu.hardware.specs import Spec

# In this order: memory and random numbers before the driver that uses them; what is refused after all that answers
PATCH_MODULES = """
    torch_api.memory torch_api.random torch_api.cuda torch_api.streams torch_api.tensor torch_api.construct
    torch_api.functions torch_api.moves torch_api.files torch_api.processes torch_api.data_parallel torch_api.host_time
    distributed.operations torch_api.autocast torch_api.hooks torch_api.nvml torch_api.surface"""

with names_of_pytorch():
    import torch

    from virtualgpu import _compat
    from virtualgpu.engine import cuda_only_ops
    from virtualgpu.engine.dispatch import Dispatch, DispatchBesideReal
    from virtualgpu.engine.frames import holders
    from virtualgpu.engine.machine import Machine, dry_runs
    from virtualgpu.sanitizer import hooks
    from virtualgpu.torch_api import processes
    from virtualgpu.torch_api.patches import Patches

    MODULES = [importlib.import_module(f"virtualgpu.{name}") for name in PATCH_MODULES.split()]

# -- What stands in for PyTorch's GPUs, as a whole


class Session:
    """Virtual GPUs: `open` turns them on, `close` off. Both may be cut short (Ctrl-C): close then finishes."""

    def __init__(
        self,
        cards: Sequence[Spec],
        visible: list[int] | None,
        impersonates_real: bool,
        settings: MachineSettings,
        sanitize: bool = False,
    ):
        self.cards, self.impersonates_real = tuple(cards), impersonates_real
        self.settings, self.sanitize = settings, sanitize
        self.machine = Machine(list(cards), visible, settings, self.enter, self.leave)
        self.patches, self.sanitizer = Patches(), Patches()
        self.lifted = _compat.lifts_only_cpu_tensors()

    def open(self) -> None:
        """Replace PyTorch's functions, module after module; this thread and the main one see the virtual GPUs.

        Raises NotImplementedError where PyTorch's own detector of races is on already: it would be told nothing.
        """
        if _compat.gpu_trace_has_listeners():
            raise NotImplementedError(
                "TORCH_CUDA_SANITIZER: PyTorch's own detector of races is not modelled on virtual GPUs: unset it, and run the program by "
                "python -m virtualgpu --sanitize"
            )
        self.machine.stand_beside(_compat.real_gpus())
        _compat.lift_only_cpu_tensors(True)
        _compat.guard_without_driver()
        cuda_only_ops.install()
        for module in MODULES:
            module.install(self.machine, self.patches)
        self.patches.spread()
        self.look_for_races(self.sanitize)
        self.enter()
        if holders.of_cpp is None:
            holders.learn()
        processes.tell_main_thread(self.meet)

    def look_for_races(self, on: bool) -> None:
        """From now on, or no longer."""
        self.sanitizer.restore()
        self.sanitize = on
        if on:
            hooks.install_detector(self.machine, self.sanitizer)

    def enter(self) -> None:
        """This thread sees the virtual GPUs from now on. Modes of others that are on may end before ours."""
        _leave()
        self.machine.local.saw(self.machine)
        _compat.enter_below((DispatchBesideReal if self.machine.real_gpus else Dispatch)(self.machine))

    def leave(self) -> None:
        """Called by a thread that ends. C++ would let go of the mode only after that, and where Python is ending too, it aborts the process."""
        self.machine.local.saw(None)
        _compat.remove_modes(lambda mode: isinstance(mode, Dispatch) and mode.machine is self.machine)

    def meet(self) -> None:
        """As `enter`, for a thread that may have done so."""
        if not self.machine.closed and self.machine.local.seen is not self.machine:
            self.enter()

    def close(self) -> None:
        """Each function of PyTorch back in its place. Threads that still have the mode are not disturbed: it lets all pass."""
        self.machine.close()
        _leave()
        processes.tell_main_thread(_leave)
        _compat.lift_only_cpu_tensors(self.lifted)
        self.sanitizer.restore()
        self.patches.restore()


def _leave() -> None:
    """This thread has no mode any more of a session that has ended, perhaps in another thread."""
    _compat.remove_modes(lambda mode: isinstance(mode, Dispatch) and mode.machine.closed)


# -- What `gpus` returns and says: virtual GPUs, or the machine's own.


class Devices(list):
    """The devices, as a list; used in a with statement, virtual GPUs that this call made, or its limit on real ones, go when it ends (`undo`)."""

    def __init__(self, gpus, undo: Callable[[], None] = lambda: None):
        super().__init__(gpus)
        self.undo = undo

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error) -> None:
        self.undo()


def virtual_ones(session: Session, undo: Callable[[], None] = lambda: None) -> Devices:
    """Those of the session, announced in a line."""
    cards, n = session.cards, len(session.cards)
    what = f"{'s, each' if n > 1 else ','} like a {cards[0].name} with {_size(cards[0])}"
    if any(card != cards[0] for card in cards):
        what = "s: " + ", ".join(f"a {card.name} with {_size(card)}" for card in cards)
    worth = "a lower bound" if session.settings.clock == DATASHEET else "most steps within 30 %"
    print(f"{n} virtual GPU{what}: numbers and memory are real, time is simulated ({worth}).")
    return Devices((gpu.device for gpu in session.machine.gpus), undo)


def _size(card: Spec) -> str:
    return f"{card.memory / 2**30:.4g} GiB" if card.memory >= 2**30 else f"{card.memory / 2**20:.4g} MiB"


def real_ones(n: int, limits: Sequence[int] | None) -> Devices:
    """The first `n` of the machine, announced in a line. limits: bytes that this process may take of each, until `undo`; all of it unless given."""
    before = [torch.cuda.get_per_process_memory_fraction(i) for i in range(n)]
    _limit([min(1.0, limits[i] / torch.cuda.mem_get_info(i)[1]) if limits else 1.0 for i in range(n)])
    print(f"{n} real GPU{'s' * (n > 1)}: {', '.join(torch.cuda.get_device_name(i) for i in range(n))}.")
    return Devices((torch.device("cuda", i) for i in range(n)), functools.partial(_limit, before))


def _limit(shares: Sequence[float]) -> None:
    for index, share in enumerate(shares):
        torch.cuda.set_per_process_memory_fraction(share, index)


# -- On and off


def turn_on(
    cards: Sequence[Spec],
    visible: list[int] | None = None,
    impersonates_real: bool = False,
    settings: MachineSettings = MachineSettings(),  # noqa: B008
) -> Session:
    """On, or, where that fails, nothing changed."""
    global _session
    session = _session = Session(cards, visible, impersonates_real, settings, _sanitize)
    session.machine.read_timers(_timers)
    try:
        session.open()
    except BaseException:  # Ctrl-C among them
        reset()
        raise
    return session


def _one_at_a_time(function):
    """Two threads that turn GPUs on and off do so one after the other."""

    @functools.wraps(function)
    def alone(*args, **kwargs):
        with _lock:
            return function(*args, **kwargs)

    return alone


_lock = threading.RLock()
_session: Session | None = None
_sanitize = False  # are races looked for, on whatever GPUs are on?
_timers = "warn"  # see Machine.timers
_played: Session | None = None  # the runner's, which pass for real ones, while others of a notebook's own are on


def _in_forked_child() -> None:
    """A GPU that was used before a fork cannot be used after it, as where GPUs are real."""
    global _lock
    _lock = threading.RLock()
    dry_runs.begin_anew()
    if _session is not None:
        _session.machine.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_forked_child)


def current() -> Machine | None:
    """The virtual GPUs that are on, whatever they pass for."""
    return None if _session is None else _session.machine


def look_for_races(on: bool) -> bool:
    """On the GPUs that are on, and those that come after them. Returns what was before."""
    global _sanitize
    before, _sanitize = _sanitize, on
    if _session is not None and _session.sanitize is not on:
        _session.look_for_races(on)
    return before


def looks_for_races() -> bool:
    """Are they looked for?"""
    return _sanitize


def timers(kind: str) -> None:
    """What time.time(), perf_counter(), monotonic(), timeit, torch.utils.benchmark and tqdm tell the program from now on: "simulated", what would have
    passed where the GPUs are real, with the program's own work outside of PyTorch as long as a processor works on it here; "real", what
    passes on this machine. In a notebook they are real unless this is called, under the runner simulated.

    Raises ValueError for anything else.
    """
    global _timers
    if kind not in ("simulated", "real"):
        raise ValueError(f'timers({kind!r}): choose "simulated" or "real"')
    _timers = kind
    if _session is not None:
        _session.machine.read_timers(kind)


def timers_of_others() -> str:
    """`timers` of the processes that this one starts."""
    return "real" if _timers == "warn" else _timers


def of_the_runner() -> bool:
    """Are the virtual GPUs that are on those that the runner gives each process?"""
    return _session is not None and _session.impersonates_real


def machine() -> Machine | None:
    """The virtual GPUs that are on. None, too, where they are to pass for real ones (HELPERS_GPUS=real), but in a dry run."""
    if _session is None or (_session.impersonates_real and not _session.machine.dry and _wanted_kind() == "real"):
        return None
    return _session.machine


@_one_at_a_time
def gpus(
    n: int = 2,
    like="T4",
    memory: int | str | None = None,
    gpus_per_node: int | None = None,
    network: str | Network | None = None,
    clock: str | None = None,
    host: str | None = None,
) -> Devices:
    """`n` GPUs to work with: real ones where this machine has as many, otherwise virtual ones modelled on `like`.

    like: a card's name (`virtualgpu.SPECS` lists them), several for a mixed machine ("T4,V100"), the path of a card of your own, or
    a Spec. memory: bytes, or text such as "256 MB"; the card's own unless given. On real GPUs it limits what this process may take; below
    1 GiB, the GPUs are always virtual.

    gpus_per_node: ranks on GPUs 0, 1, ... of these play on one node, the next ones on another, and so on; all on one unless given.
    network: what joins nodes, a name ("InfiniBand NDR", "Ethernet 25": `hardware.machine.NETWORKS` has all) or a rate ("100 Gb/s" for each
    GPU, "100 Gb/s per node"); what PyTorch's model has for the card unless given.
    clock: "measured" (kernels take what others measured on such cards) unless given, or "datasheet" (what the maker promises: a lower
    bound). host: what an operation costs the processor, a name in `hardware.machine.HOSTS` ("2026" unless given).

    HELPERS_GPUS=virtual or real chooses one kind. Asking again for the same keeps what is there; asking for other GPUs starts
    afresh, and tensors on the old ones are lost.

    Raises ValueError for an invalid number, name, size, network, clock or host; RuntimeError if HELPERS_GPUS=real and there are too few.
    """
    global _played
    check_number("gpus", n)
    cards = tuple(specs.find_specs(n, like, memory))
    settings = hardware_settings.find_settings(n, gpus_per_node, network, clock, host)
    kind = _wanted_kind()
    if _session is not None and not _session.impersonates_real:
        new = (_session.cards, _session.settings) != (cards, settings)
        if new:
            dry = _session.machine.always_dry
            _close()
            turn_on(cards, settings=settings).machine.be_dry(dry)
        meet()
        return virtual_ones(_session, *[reset] * new)
    small = kind != "real" and memory is not None and any(card.memory < SMALLEST for card in cards)
    real = 0 if kind == "virtual" or small else _compat.real_gpus()
    if real >= n:
        return real_ones(n, None if memory is None else [card.memory for card in cards])
    if kind == "real" and _session is None:
        raise RuntimeError(
            f"HELPERS_GPUS=real asks for {n} real GPUs, and PyTorch sees {real}. Unset it, or set it to virtual, to have virtual ones"
        )
    before = _close()  # under the runner, which plays real ones, reset() leaves those that were there before
    _played = before if kind == "real" else None
    return virtual_ones(turn_on(cards, settings=settings), reset)


@_one_at_a_time
def activate(
    cards: Sequence[Spec],
    dry: bool = False,
    gpus_per_node: int | None = None,
    network: str | None = None,
    sanitize: bool | None = None,
    clock: str | None = None,
    host: str | None = None,
    stopwatches: str | None = None,
) -> Machine:
    """Virtual GPUs on, without a word, and passing for real ones: what the runner does in each process, after `import torch`.

    The process has those that CUDA_VISIBLE_DEVICES leaves, until it uses one. sanitize: are races looked for, also on others that the
    program makes? stopwatches: as in `timers`. Both as before unless given. The others: as in `gpus`.
    """
    global _played
    _played = None
    _close()
    if sanitize is not None:
        look_for_races(sanitize)
    if stopwatches is not None:
        timers(stopwatches)

    choose = functools.partial(visible_gpus, len(cards), gpus_per_node=gpus_per_node)
    settings = hardware_settings.find_settings(len(cards), gpus_per_node, network, clock, host)
    machine = turn_on(cards, choose(), impersonates_real=True, settings=settings).machine
    machine.be_dry(dry)
    machine.choose_by(choose)
    return machine


@_one_at_a_time
def restart() -> None:
    """The same virtual GPUs, fresh: empty, at time zero. Tensors on the old ones are lost."""
    old = _close()
    if old is None:
        raise RuntimeError("there are no virtual GPUs to renew: call gpus() first")
    new = turn_on(old.cards, old.machine.visible, old.impersonates_real, old.settings).machine
    new.be_dry(old.machine.always_dry)
    new.choose_by(old.machine.choose)
    if old.machine.ledger is not None:
        new.share(old.machine.ledger)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """The virtual GPUs that are on are off in this block; after it they are back, and what lies on them."""
    global _played
    before, played_before, _played = _close(), _played, None
    try:
        yield
    finally:
        _close()
        _reopen(before)
        _played = played_before


# Bytes: a limit below that is no real card's. cuBLAS alone works in 17 MiB of it, and in 65 on a Hopper: of lesson 06's 256 MiB an H100 left too
# few for a third of the cells
SMALLEST = 1 << 30


def _wanted_kind() -> str:
    kind = os.environ.get("HELPERS_GPUS", "").lower()
    if kind not in ("", "virtual", "real"):
        raise ValueError(f"HELPERS_GPUS={kind!r}: set it to virtual or real, or leave it unset")
    return kind


def check_number(who: str, n: int) -> None:
    """Raises ValueError unless `n` is a whole number from 1 to MAX_GPUS; `who` is the function that was called."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_GPUS:
        raise ValueError(f"{who}({n!r}): ask for 1 to {MAX_GPUS} GPUs")


def meet() -> None:
    """This thread sees the virtual GPUs that are on, also where it is older than they are."""
    if _session is not None:
        _session.meet()


@_one_at_a_time
def reset() -> None:
    """Virtual GPUs off: each function of PyTorch back in its place. Tensors stay, as ordinary CPU tensors. Under the runner, after
    gpus() made others than those that it plays, these are there again; those that pass for real ones (HELPERS_GPUS=real) stay.
    """
    if _session is None or machine() is not None:
        deactivate()


@_one_at_a_time
def deactivate() -> None:
    """As `reset`, also of those that pass for real ones: what `activate` turned on."""
    global _played
    _close()
    played, _played = _played, None
    _reopen(played)


def _close() -> Session | None:
    """What was on, and is off."""
    global _session
    if (closed := _session) is not None:
        closed.close()
        _session = None
    return closed


def _reopen(session: Session | None) -> None:
    """On again, with what lies on its GPUs."""
    global _session
    if session is not None:
        session.machine.reopen()
        _session = session
        session.open()
