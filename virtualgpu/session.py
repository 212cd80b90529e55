"""Virtual GPUs on and off: `gpus` and `reset`; `activate` for the runner, `renew` for the pytest plugin. `blocks` has the rest."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtualgpu import _compat
from virtualgpu.distributed import patches as distributed
from virtualgpu.distributed.nodes import ONE_NODE, Nodes
from virtualgpu.engine import kernels, meta
from virtualgpu.engine.dispatch import Dispatch
from virtualgpu.engine.machine import Machine
from virtualgpu.environment import visible_gpus
from virtualgpu.hardware import specs
from virtualgpu.hardware.networks import Network
from virtualgpu.hardware.specs import Spec
from virtualgpu.patches import (
    autocast,
    compiler,
    cuda,
    data_parallel,
    devices,
    dlpack,
    foreach,
    functions,
    gputil,
    legacy,
    memory,
    monitor,
    nvml,
    pools,
    profiler,
    random,
    storage,
    streams,
    sync_debug,
    tensor,
    threads,
)
from virtualgpu.patches.registry import Patches

MAX_GPUS = 64  # more than any one machine has: a slip, rather
# In this order: memory and random numbers before the driver that uses them
FACES = (
    memory,
    pools,
    random,
    streams,
    sync_debug,
    cuda,
    tensor,
    functions,
    devices,
    storage,
    dlpack,
    legacy,
    foreach,
    data_parallel,
    distributed,
    autocast,
    compiler,
    profiler,
    threads,
    gputil,
    monitor,
    nvml,
)


class Devices(list):
    """The devices, as a list; used in a with statement, virtual GPUs that this call made go when it ends."""

    made_here = False

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error) -> None:
        if self.made_here:
            reset()


class _Session:
    """Virtual GPUs: `open` turns them on, `close` off. Both may be cut short (Ctrl-C): close then finishes."""

    def __init__(self, cards: Sequence[Spec], visible: list[int] | None, as_real: bool, nodes: Nodes):
        self.cards, self.as_real, self.nodes = tuple(cards), as_real, nodes
        self.machine = Machine(list(cards), visible)
        self.machine.gpus_per_node, self.machine.network = nodes
        self.machine.enter = self.enter
        self.patches = Patches()
        self.lifted = _compat.lifts_only_cpu_tensors()

    def open(self) -> None:
        _compat.lift_only_cpu_tensors(True)
        _compat.guard_without_driver()
        meta.install()
        kernels.install()
        for face in FACES:
            face.install(self.machine, self.patches)
        for register, kind in (
            (register_optimizer_step_pre_hook, "optimizer"),
            (register_optimizer_step_post_hook, "forward"),
        ):
            self.patches.undo(register(lambda *_, kind=kind: self._kind(kind)).remove)
        self.enter()
        threads.tell_main_thread(self._enter_late)

    def enter(self) -> None:
        """This thread sees the virtual GPUs from now on. Modes of others that are on may end before ours."""
        _leave()
        self.machine.local.seen = self.machine
        _compat.enter_below(Dispatch(self.machine))

    def _enter_late(self) -> None:
        if not self.machine.closed and self.machine.local.seen is not self.machine:
            self.enter()

    def close(self) -> None:
        """Each function of PyTorch back in its place. Threads that still have the mode are not disturbed: it lets all pass."""
        self.machine.closed = True
        self.machine.local.seen = None
        _leave()
        threads.tell_main_thread(_leave)
        _compat.lift_only_cpu_tensors(self.lifted)
        self.patches.restore()

    def _kind(self, kind: str) -> None:
        self.machine.clock.local.kind = kind


def _leave() -> None:
    """This thread has no mode any more of a session that has ended, perhaps in another thread."""
    _compat.remove_modes(lambda mode: isinstance(mode, Dispatch) and mode.machine.closed)


def turn_on(
    cards: Sequence[Spec], visible: list[int] | None = None, as_real: bool = False, nodes: Nodes = ONE_NODE
) -> _Session:
    """On, or, where that fails, nothing changed."""
    global _session
    session = _session = _Session(cards, visible, as_real, nodes)
    try:
        session.open()
    except BaseException:  # Ctrl-C among them
        reset()
        raise
    return session


_session: _Session | None = None


def _in_forked_child() -> None:
    """A GPU that was used before a fork cannot be used after it, as where GPUs are real. Work on the CPU has numbers."""
    if _session is not None:
        _session.machine.dry = False
        _session.machine.forked = _session.machine.initialized


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_forked_child)


def current() -> Machine | None:
    """The virtual GPUs that are on, whatever they pass for."""
    return _session and _session.machine


def machine() -> Machine | None:
    """The virtual GPUs that are on, if any. None, too, where they are to pass for real ones (HELPERS_GPUS=real under the runner), but
    in a dry run, which real ones cannot do.
    """
    if _session is None or (_session.as_real and not _session.machine.dry and _wanted_kind() == "real"):
        return None
    return _session.machine


def gpus(
    n: int = 2,
    like="T4",
    memory: int | str | None = None,
    gpus_per_node: int | None = None,
    network: str | Network | None = None,
) -> Devices:
    """`n` GPUs to work with: real ones where this machine has as many, otherwise virtual ones modelled on `like`.

    like: a card's name (`virtualgpu.SPECS` lists them), several for a mixed machine ("T4,V100"), the path of a card of your own, or
    a Spec. memory: bytes, or text such as "256 MB"; the card's own unless given; on real GPUs it limits what this process may take.
    gpus_per_node: ranks on GPUs 0, 1, ... of these play on one node, the next ones on another, and so on; all on one unless given.
    network: what joins nodes, a name ("InfiniBand NDR", "Ethernet 25": `hardware.networks` has all) or a rate ("100 Gb/s" for each
    GPU, "100 Gb/s per node"); what PyTorch's model has for the card unless given.

    HELPERS_GPUS=virtual or real chooses one kind. Asking again for the same keeps what is there; asking for other GPUs starts
    afresh, and tensors on the old ones are lost.

    Raises ValueError for an invalid number, name, size or network; RuntimeError if HELPERS_GPUS=real and there are too few.
    """
    check_number("gpus", n)
    cards, nodes = tuple(specs.find_all(n, like, memory)), Nodes.of(n, gpus_per_node, network)
    kind = _wanted_kind()
    if _session is not None and not _session.as_real:
        new = (_session.cards, _session.nodes) != (cards, nodes)
        if new:
            dry = _session.machine.dry
            reset()
            turn_on(cards, nodes=nodes).machine.dry = dry
        return _announce(_session, new)
    real = 0 if kind == "virtual" else torch.cuda.device_count()
    if real >= n:
        for index in range(n):
            share = 1.0 if memory is None else min(1.0, cards[index].memory / torch.cuda.mem_get_info(index)[1])
            torch.cuda.set_per_process_memory_fraction(share, index)
        print(f"{n} real GPU{'s' * (n > 1)}: {', '.join(torch.cuda.get_device_name(i) for i in range(n))}.")
        return Devices(torch.device("cuda", index) for index in range(n))
    if kind == "real" and _session is None:  # under the runner, which plays them, do as where too few are real
        raise RuntimeError(
            f"HELPERS_GPUS=real asks for {n} real GPUs, and PyTorch sees {real}. Unset it, or set it to virtual, to have virtual ones"
        )
    reset()
    return _announce(turn_on(cards, nodes=nodes), True)


def activate(
    cards: Sequence[Spec],
    dry: bool = False,
    gpus_per_node: int | None = None,
    network: str | None = None,
) -> Machine:
    """Virtual GPUs on, without a word, and passing for real ones: what the runner does in each process, after `import torch`.

    The process has those that CUDA_VISIBLE_DEVICES leaves, until it uses one. gpus_per_node, network: as in `gpus`.
    """
    reset()

    def choose() -> list[int]:
        return visible_gpus(len(cards), gpus_per_node=gpus_per_node)

    nodes = Nodes.of(len(cards), gpus_per_node, network)
    machine = turn_on(cards, choose(), as_real=True, nodes=nodes).machine
    machine.dry, machine.choose = dry, choose
    return machine


def renew() -> None:
    """The same virtual GPUs, fresh: empty, at time zero. Tensors on the old ones are lost."""
    if _session is None:
        raise RuntimeError("there are no virtual GPUs to renew: call gpus() first")
    old = _session
    reset()
    new = turn_on(old.cards, old.machine.visible, old.as_real, old.nodes).machine
    new.dry, new.choose = old.machine.dry, old.machine.choose
    if old.machine.ledger is not None:
        new.share(old.machine.ledger)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """The virtual GPUs that are on are off in this block; after it they are back, and what lies on them."""
    global _session
    kept = _session
    reset()
    try:
        yield
    finally:
        reset()
        if kept is not None:
            kept.machine.closed, _session = False, kept
            kept.open()


def _wanted_kind() -> str:
    kind = os.environ.get("HELPERS_GPUS", "").lower()
    if kind not in ("", "virtual", "real"):
        raise ValueError(f"HELPERS_GPUS={kind!r}: set it to virtual or real, or leave it unset")
    return kind


def check_number(who: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_GPUS:
        raise ValueError(f"{who}({n!r}): ask for 1 to {MAX_GPUS} GPUs")


def _announce(session: _Session, new: bool) -> Devices:
    def size(card: Spec) -> str:
        return f"{card.memory / 2**30:.4g} GiB" if card.memory >= 2**30 else f"{card.memory / 2**20:.4g} MiB"

    cards, n = session.cards, len(session.cards)
    if all(card == cards[0] for card in cards):
        what = f"{'s, each' if n > 1 else ','} like a {cards[0].name} with {size(cards[0])}"
    else:
        what = "s: " + ", ".join(f"a {card.name} with {size(card)}" for card in cards)
    print(f"{n} virtual GPU{what}: numbers and memory are real, time is simulated.")
    devices = Devices(gpu.device for gpu in session.machine.gpus)
    devices.made_here = new
    return devices


def reset() -> None:
    """Virtual GPUs off: each function of PyTorch back in its place. Tensors stay, as ordinary CPU tensors."""
    global _session
    if _session is not None:
        _session.close()
        _session = None
