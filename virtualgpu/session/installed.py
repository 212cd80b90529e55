"""What stands in for PyTorch's GPUs while virtual ones are on, put in place and taken out again as a whole; and what `gpus` returns and says."""

import functools
import importlib
from collections.abc import Callable, Sequence

import torch

from virtualgpu import _compat
from virtualgpu.engine import cuda_only_ops
from virtualgpu.engine.dispatch import Dispatch, DispatchBesideReal
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import holders
from virtualgpu.hardware.settings import DATASHEET, MachineSettings
from virtualgpu.hardware.specs import Spec
from virtualgpu.sanitizer import hooks
from virtualgpu.torch_api import processes
from virtualgpu.torch_api.patches import Patches

# In this order: memory and random numbers before the driver that uses them; what is refused after all that answers
PATCH_MODULES = """
    torch_api.memory torch_api.random torch_api.cuda torch_api.streams torch_api.tensor torch_api.construct
    torch_api.functions torch_api.moves torch_api.files torch_api.processes torch_api.data_parallel torch_api.host_time
    distributed.process_group torch_api.autocast torch_api.hooks torch_api.nvml torch_api.surface"""
MODULES = [importlib.import_module(f"virtualgpu.{name}") for name in PATCH_MODULES.split()]


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
