"""What stands in for PyTorch's GPUs while virtual ones are on: put in place and taken out again, as a whole."""

from collections.abc import Sequence

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtualgpu import _compat
from virtualgpu.distributed import patches as distributed
from virtualgpu.distributed.nodes import Nodes
from virtualgpu.engine import kernels, meta_kernels
from virtualgpu.engine.allocation import holders
from virtualgpu.engine.dispatch import Dispatch
from virtualgpu.engine.machine import Machine
from virtualgpu.hardware.hosts import ClockSettings
from virtualgpu.hardware.specs import Spec
from virtualgpu.sanitizer import gpu_trace, switch
from virtualgpu.torch_api import (
    autocast,
    batch_norm,
    blas,
    compiler,
    cuda,
    data_parallel,
    devices,
    distributions,
    dlpack,
    foreach,
    functions,
    legacy,
    memory,
    monitor,
    nvml,
    pools,
    profiler,
    random,
    recurrent,
    saving,
    sending,
    storage,
    streams,
    surface,
    sync_debug,
    tensor,
    threads,
    triton,
)
from virtualgpu.torch_api.registry import Patches

# In this order: memory and random numbers before the driver that uses them; what is refused after all that answers
PATCH_MODULES = (
    memory,
    pools,
    random,
    streams,
    sync_debug,
    blas,
    cuda,
    tensor,
    functions,
    recurrent,
    devices,
    storage,
    saving,
    sending,
    dlpack,
    legacy,
    foreach,
    data_parallel,
    distributions,
    distributed,
    batch_norm,
    autocast,
    compiler,
    profiler,
    triton,
    threads,
    monitor,
    nvml,
    surface,
)


class Session:
    """Virtual GPUs: `open` turns them on, `close` off. Both may be cut short (Ctrl-C): close then finishes."""

    def __init__(
        self,
        cards: Sequence[Spec],
        visible: list[int] | None,
        impersonates_real: bool,
        nodes: Nodes,
        sanitize: bool = False,
        clock: ClockSettings = ClockSettings(),  # noqa: B008
    ):
        self.cards, self.impersonates_real, self.nodes = tuple(cards), impersonates_real, nodes
        self.sanitize, self.clock = sanitize, clock
        self.machine = Machine(list(cards), visible, clock)
        self.machine.gpus_per_node, self.machine.network = nodes
        self.machine.enter, self.machine.leave = self.enter, self.leave
        self.patches, self.sanitizer = Patches(), Patches()
        self.lifted = _compat.lifts_only_cpu_tensors()

    def open(self) -> None:
        """Replace PyTorch's functions, module after module; this thread and the main one see the virtual GPUs."""
        _compat.lift_only_cpu_tensors(True)
        _compat.guard_without_driver()
        meta_kernels.install()
        kernels.install()
        for module in PATCH_MODULES:
            module.install(self.machine, self.patches)
        gpu_trace.install(self.machine, self.patches)
        self.patches.spread()
        for register, kind in (
            (register_optimizer_step_pre_hook, "optimizer"),
            (register_optimizer_step_post_hook, "forward"),
        ):
            self.patches.undo(register(lambda *_, kind=kind: self._kind(kind)).remove)
        self.look_for_races(self.sanitize)
        self.enter()
        if holders.of_cpp is None:
            holders.learn()
        threads.tell_main_thread(self.meet)

    def look_for_races(self, on: bool) -> None:
        """From now on, or no longer."""
        self.sanitizer.restore()
        self.sanitize = on
        if on:
            switch.install(self.machine, self.sanitizer)

    def enter(self) -> None:
        """This thread sees the virtual GPUs from now on. Modes of others that are on may end before ours."""
        _leave()
        self.machine.local.seen = self.machine
        _compat.enter_below(Dispatch(self.machine))

    def leave(self) -> None:
        """Called by a thread that ends. C++ would let go of the mode only after that, and where Python is ending too, it aborts the process."""
        self.machine.local.seen = None
        _compat.remove_modes(lambda mode: isinstance(mode, Dispatch) and mode.machine is self.machine)

    def meet(self) -> None:
        """As `enter`, for a thread that may have done so."""
        if not self.machine.closed and self.machine.local.seen is not self.machine:
            self.enter()

    def close(self) -> None:
        """Each function of PyTorch back in its place. Threads that still have the mode are not disturbed: it lets all pass."""
        self.machine.closed = True
        self.machine.local.seen = None
        _leave()
        threads.tell_main_thread(_leave)
        _compat.lift_only_cpu_tensors(self.lifted)
        self.sanitizer.restore()
        self.patches.restore()

    def _kind(self, kind: str) -> None:
        self.machine.clock.local.kind = kind


def _leave() -> None:
    """This thread has no mode any more of a session that has ended, perhaps in another thread."""
    _compat.remove_modes(lambda mode: isinstance(mode, Dispatch) and mode.machine.closed)
