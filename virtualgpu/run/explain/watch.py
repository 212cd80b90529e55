"""In each process of `--explain`: what its GPUs did in each step, left for the runner; with a change (`changes`) where it asks for one."""

import functools
import itertools
import multiprocessing
import os
import statistics
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from virtualgpu import _compat, environment
from virtualgpu._compat import in_tf32
from virtualgpu._compat.distributed import comm_hooks
from virtualgpu.distributed.topology import Layout
from virtualgpu.engine.cuda_differences import HALVES
from virtualgpu.run import results
from virtualgpu.run.explain import applied
from virtualgpu.run.explain.changes import LEFT, Explained, parts
from virtualgpu.run.trials import steps
from virtualgpu.timing.trace import Recording
from virtualgpu.torch_api.host_time import measuring
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

    def on_step(self) -> None:
        """A step was made. What the first one did is nobody's to tell: it makes the optimizer's state."""
        super().on_step()
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
        unhooked = (ddp for ddp in self.wrapped if not comm_hooks(ddp))
        parameters = itertools.chain.from_iterable(ddp.parameters() for ddp in unhooked)
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


# -- What a program's DataLoaders take, measured on this machine, on the simulated clock: in `--explain` alone.
#
# Without workers the host is in the loader for as long as `next` really lasts. Workers load beside the step: what each really takes for a
# batch is measured in it, and a batch is there one worker's share of that after the one before, and no earlier than that time after
# its worker was asked for it. A dry run's own pace, which is not the program's, thus decides over nothing.

SUFFIX = ".fetched"
NUMBER = struct.Struct("d")


class Loader:
    """Of this process. seconds_of: says the seconds of a batch, as an earlier run measured them; None: they are measured. loading: from when to when, on
    the simulated clock, the host waited for a batch. seconds: of each batch. folder: where workers leave what they took."""

    def __init__(self, machine, patches: Patches, folder: str, seconds_of: Callable[[], float | None]):
        self.clock, self.folder, self.seconds_of = machine.clock, folder, seconds_of
        self.loading: list[tuple[float, float]] = []
        self.seconds: list[float] = []
        self.workers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each iterator that has some
        patches.stand_in(DataLoader, "__iter__", self._begin)
        patches.stand_in(_compat.loader_iterator(), "__next__", self._next)
        for fetcher in _compat.fetchers():
            patches.stand_in(fetcher, "fetch", self._fetch)

    def _begin(self, original, loader):
        iterator = original(loader)
        if loader.num_workers:
            ahead = loader.num_workers * (loader.prefetch_factor or 2)
            self.workers[iterator] = _Workers(loader.num_workers, ahead, self.clock.host)
        return iterator

    def _next(self, original, iterator):
        start = time.perf_counter()
        with measuring():
            batch = original(iterator)
        seconds, workers, now = time.perf_counter() - start, self.workers.get(iterator), self.clock.host
        if (measured := self.seconds_of()) is not None:
            seconds = measured
        elif workers is not None:
            seconds = self._fetched() or seconds
        until = now + seconds if workers is None else workers.ready(now, seconds)
        self.seconds.append(seconds)
        if until > now:
            self.loading.append((now, until))
            self.clock.wait_until(until)
        return batch

    def _fetch(self, original, *args):
        """In a worker it is measured."""
        start = time.perf_counter()
        batch = original(*args)
        parent = multiprocessing.parent_process()
        if _compat.in_loader_worker() and parent is not None:
            with open(os.path.join(self.folder, f"{parent.pid}.{os.getpid()}{SUFFIX}"), "ab", buffering=0) as file:
                file.write(NUMBER.pack(time.perf_counter() - start))
        return batch

    def _fetched(self) -> float | None:
        """What this process's workers have taken for a batch so far: the median, which the first ones do not move."""
        taken: list[float] = []
        for path in Path(self.folder).glob(f"{os.getpid()}.*{SUFFIX}"):
            data = path.read_bytes()
            taken += [value for (value,) in NUMBER.iter_unpack(data[: len(data) // NUMBER.size * NUMBER.size])]
        return statistics.median(taken) if taken else None


class _Workers:
    """Of one iterator, on the simulated clock. ahead: batches that are asked for before they are needed."""

    def __init__(self, count: int, ahead: int, now: float):
        self.count, self.last, self.asked = count, now, deque([now] * ahead)

    def ready(self, now: float, seconds: float) -> float:
        """When the next batch is there; one more is asked for then."""
        self.last = max(self.last + seconds / self.count, self.asked.popleft() + seconds)
        self.asked.append(max(now, self.last))
        return self.last
