"""Virtual GPUs on and off: `gpus`, `dry_run`, `reset`."""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
import torch._dynamo  # it takes note of PyTorch's functions when torchvision or DDP import it, and must not find ours then
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtualgpu.engine.dispatch import Dispatch
from virtualgpu.engine.machine import HOME, Machine
from virtualgpu.hardware import specs
from virtualgpu.patches import cuda, gputil
from virtualgpu.patches.placement import Placement
from virtualgpu.patches.registry import Patches
from virtualgpu.simulation.clock import Span

MOST = 8  # GPUs in one machine, as in the largest common ones


class Devices(list):
    """The devices, as a list; used in a with statement, virtual GPUs go when it ends."""

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error) -> None:
        reset()


class _Session:
    """Virtual GPUs that are on, and how to turn them off."""

    def __init__(self, asked: tuple):
        n, spec = asked
        self.asked = asked
        self.machine = Machine([spec] * n)
        self.patches = Patches()
        Placement(self.machine, self.patches).install()
        cuda.CUDA(self.machine, self.patches).install()
        gputil.install(self.machine, self.patches)
        self.patches.replace(threading.Thread, "start", _in_threads_too(threading.Thread.start, self.machine))
        _autocast(self.patches, self.machine)
        self.package = (0, self._tag, self._restore)  # before PyTorch's own, which have 10 and more
        torch.serialization.register_package(*self.package)
        self.steps = [
            register_optimizer_step_pre_hook(lambda *_: self._kind("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._kind("forward")),
        ]
        self.mode = Dispatch(self.machine)
        self.mode.__enter__()

    def close(self) -> None:
        self.mode.__exit__(None, None, None)
        for hook in self.steps:
            hook.remove()
        torch.serialization._package_registry.remove(self.package)
        self.patches.restore()

    def _kind(self, kind: str) -> None:
        self.machine.clock.kind = kind

    def _tag(self, storage) -> str | None:
        """torch.save asks where a storage is."""
        if self.machine.dry and storage.device.type == "meta":
            raise RuntimeError("this tensor comes from a dry run and has no values to save. Save it outside dry_run()")
        home = getattr(storage, HOME, None)
        return None if home is None else f"cuda:{home.gpu.index}"

    def _restore(self, storage, location: str):
        """torch.load asks for a storage to be put where it was, or where map_location says."""
        if not location.startswith("cuda"):
            return None
        index = torch.device(location).index or 0
        if index >= len(self.machine.gpus):
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{len(self.machine.gpus)}. Please use torch.load with map_location to map your storages to an existing device."
            )
        return self.machine.place_storage(storage, self.machine.gpus[index])


_session: _Session | None = None


def _in_forked_child() -> None:
    """A DataLoader's worker and its kind prepare data on the CPU, as they must where GPUs are real."""
    if _session is not None:
        _session.machine.dry, _session.machine.local.bypass = False, True


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_forked_child)


def machine() -> Machine | None:
    """The virtual GPUs that are on, if any."""
    return _session.machine if _session else None


def gpus(n: int = 2, like: str = "T4", memory: int | str | None = None) -> Devices:
    """`n` GPUs to work with: real ones where this machine has as many, otherwise virtual ones modelled on `like`.

    like: T4, V100, A100 or H100. memory: bytes, or text such as "256 MB"; the card's own unless given; on real GPUs it
    limits what this process may take. HELPERS_GPUS=virtual or real chooses one kind. Asking again for the same keeps what
    is there; asking for other GPUs starts afresh, and tensors on the old ones are lost.

    Raises ValueError for a number, a name or a size that cannot be; RuntimeError where real GPUs are demanded and missing.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST:
        raise ValueError(f"gpus({n!r}): ask for 1 to {MOST} GPUs")
    spec = specs.find(like, memory)
    kind = os.environ.get("HELPERS_GPUS", "").lower()
    if kind not in ("", "virtual", "real"):
        raise ValueError(f"HELPERS_GPUS={kind!r}: set it to virtual or real, or leave it unset")
    global _session
    asked = (n, spec)
    if _session is not None:
        if _session.asked != asked:
            dry = _session.machine.dry
            reset()
            _session = _Session(asked)
            _session.machine.dry = dry
        return _told(_session)
    real = 0 if kind == "virtual" else torch.cuda.device_count()
    if real >= n:
        for index in range(n):
            share = 1.0 if memory is None else min(1.0, spec.memory / torch.cuda.mem_get_info(index)[1])
            torch.cuda.set_per_process_memory_fraction(share, index)
        print(f"{n} real GPU{'s' * (n > 1)}: {', '.join(torch.cuda.get_device_name(i) for i in range(n))}.")
        return Devices(torch.device("cuda", index) for index in range(n))
    if kind == "real":
        raise RuntimeError(
            f"HELPERS_GPUS=real asks for {n} real GPUs, and PyTorch sees {real}. Unset it, or set it to virtual, to have virtual ones"
        )
    _session = _Session(asked)
    return _told(_session)


def _told(session: _Session) -> Devices:
    n, spec = session.asked
    plural = "s, each" if n > 1 else ","
    size = f"{spec.memory / 2**30:.4g} GiB" if spec.memory >= 2**30 else f"{spec.memory / 2**20:.4g} MiB"
    print(f"{n} virtual GPU{plural} like a {spec.name} with {size}: numbers and memory are real, time is simulated.")
    return Devices(gpu.device for gpu in session.machine.gpus)


def reset() -> None:
    """Virtual GPUs off: each function of PyTorch back in its place. Tensors stay, as ordinary CPU tensors."""
    global _session
    if _session is not None:
        session, _session = _session, None
        session.close()


@contextlib.contextmanager
def dry_run(n: int = 2, like: str = "T4", memory: int | str | None = None) -> Iterator[None]:
    """In this block, operations work on shapes alone: places, memory and time without the numbers.

    Uses the virtual GPUs that are on, or makes some for as long as the block lasts (`n`, `like` and `memory` as in `gpus`).
    A value read inside is nan; a warning says so once. Tensors made inside have no values outside either.
    """
    global _session
    own = _session is None
    if own:
        _session = _Session((n, specs.find(like, memory)))
    before = _session.machine.dry
    _session.machine.dry = True
    try:
        yield
    finally:
        if own:
            reset()
        elif _session is not None:
            _session.machine.dry = before


@contextlib.contextmanager
def recording() -> Iterator[list[Span]]:
    """A list that fills with what each virtual GPU does in this block, on the simulated clock."""
    if _session is None:
        raise RuntimeError("there are no virtual GPUs to record: call gpus() first")
    clock = _session.machine.clock
    before, clock.spans = clock.spans, []
    try:
        yield clock.spans
    finally:
        clock.spans = before


def _in_threads_too(original, machine: Machine):
    """Modes belong to a thread. A thread started while virtual GPUs are on sees them too."""

    def start(thread):
        run = thread.run

        def run_on_virtual_gpus():
            with Dispatch(machine):
                run()

        thread.run = run_on_virtual_gpus
        original(thread)

    return start


def _autocast(patches: Patches, machine: Machine) -> None:
    """Autocast for "cuda" is the CPU's, on tensors that are the CPU's: float16 unless told otherwise."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        if machine.dry and enabled:
            raise NotImplementedError(
                "autocast is not modelled in a dry run; cast the model (.half()), or run it with numbers"
            )
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, enabled, cache_enabled)

    patches.replace(autocast, "__init__", __init__)
