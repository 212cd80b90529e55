"""In each process of `--explain`: what its GPUs did in each step, left for the runner; with a change (`changes`) where it asks for one."""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from virtualgpu import environment
from virtualgpu._compat import distributed as _compat
from virtualgpu._compat import in_tf32
from virtualgpu.distributed.topology import Layout
from virtualgpu.engine.half_precision import HALVES
from virtualgpu.run import results
from virtualgpu.run.explain import applied
from virtualgpu.run.explain.changes import LEFT, Explained, parts
from virtualgpu.run.explain.loader import Loader
from virtualgpu.run.trials import steps
from virtualgpu.timing.trace import Recording
from virtualgpu.torch_api.patches import Patches


class Watch(steps.Watch):
    """As the one of steps, which ends the program; and with it all that is left here."""

    def __init__(self, machine, most: int, change: dict, folder: str):
        super().__init__(machine, most)
        batches, patches = change.get("batches", {}), Patches()
        self.rank = environment.rank()
        measured = functools.partial(applied.of_rank, batches)
        self.loader = Loader(machine, patches, folder, lambda: 0.0 if "loader" in change else measured(rank()))
        self.half = False
        self.collectives: dict[str, tuple[int, int, float, Callable[[int], float]]] = {}
        self.wrapped: list[DistributedDataParallel] = []
        self.marks: list[tuple[int, dict]] = []  # batches and collectives until the end of each step
        self.change, Layout.duration = change, self._seconds
        register_module_forward_pre_hook(self._note_module)
        self.before_step = applied.apply(change, machine, patches, rank)
        machine.clock.record(Recording())
        self.before_step(0)

    def made(self) -> None:
        """A step was made. What the first one did is nobody's to tell: it makes the optimizer's state."""
        super().made()
        self.rank = rank()
        if self.count == 1:
            self.machine.clock.record(Recording())
        self.marks.append((len(self.loader.seconds), dict(self.collectives)))
        self.before_step(self.count)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.marks = []

    def leave(self, folder: str) -> None:
        """For `explained.collect`; and what `steps` leaves."""
        super().leave(folder)
        clock = self.machine.clock
        clock.collectives.settle()
        first = 1 if self.count > 2 else 0  # in the second step DDP makes its buckets anew
        windows = list(itertools.pairwise(self.ends[first:]))
        gpus = {}
        for gpu in self.machine.gpus:
            own = [span for span in clock.spans or [] if span.gpu == gpu.index]
            divided = [parts(own, self.loader.loading, *window) for window in windows]
            if any(step.computing for step in divided):  # a context alone is no work
                gpus[str(gpu.index)] = divided
        explained = Explained(
            self.rank,
            gpus,
            together=self._together(first, len(windows)),
            bucket_cap=min((ddp.bucket_bytes_cap / (1 << 20) for ddp in self.wrapped), default=None),
            compressible=self._compressible(),
            half=self.half,
            tf32=in_tf32("matmul"),
            batch=self._batch(first),
        )
        results.leave(folder, LEFT, explained)

    def _note_module(self, module: torch.nn.Module, _) -> None:
        if isinstance(module, DistributedDataParallel) and not any(other is module for other in self.wrapped):
            self.wrapped.append(module)
        if not self.half:
            self.half = torch.is_autocast_enabled("cuda") or any(
                tensor.dtype in HALVES for tensor in module.parameters(recurse=False)
            )

    def _seconds(self, kind: str, nbytes: int, ranks: int, real: Callable[[int], float]) -> float:
        """What a collective lasts; what it is without the change is noted."""
        if ranks > 1 and kind not in ("barrier", "p2p"):
            count, size, seconds, _ = self.collectives.get(kind, (0, 0, 0.0, real))
            self.collectives[kind] = count + 1, size + nbytes, seconds + real(nbytes), real
        return applied.seconds(self.change, kind, nbytes, real)

    def _compressible(self) -> bool:
        plain = (ddp for ddp in self.wrapped if not _compat.comm_hooks(ddp))
        parameters = itertools.chain.from_iterable(ddp.parameters() for ddp in plain)
        return any(parameter.dtype == torch.float32 for parameter in parameters if parameter.requires_grad)

    def _together(self, first: int, windows: int) -> dict[str, list[float]]:
        if not windows:
            return {}
        before, together = self.marks[first][1], {}
        for kind, (*totals, real) in self.marks[-1][1].items():
            count, size, seconds = (
                (total - earlier) / windows
                for total, earlier in zip(totals, before.get(kind, (0, 0, 0.0)), strict=False)
            )
            together[kind] = [count, size, seconds, real(max(1, int(size)))]
        return together

    def _batch(self, first: int) -> float | None:
        """Seconds, on average; None where the program has no loader."""
        taken = self.loader.seconds[self.marks[first][0] : self.marks[-1][0]] if len(self.marks) > first else []
        return sum(taken) / len(taken) if taken else None


def rank() -> int:
    """Of this process, as far as it knows by now: of its process group, or its launcher's word; -1 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else environment.rank()
