"""What a program's DataLoaders take, measured on this machine, on the simulated clock: in `--explain` alone.

Without workers the host is in the loader for as long as `next` really lasts. Workers load beside the step: what each really takes for a
batch is measured in it, and a batch is there one worker's share of that after the one before, and no earlier than that time after
its worker was asked for it. A dry run's own pace, which is not the program's, thus decides over nothing.
"""

import multiprocessing
import os
import statistics
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from torch.utils.data import DataLoader

from virtualgpu import _compat
from virtualgpu.torch_api.host_time import measuring
from virtualgpu.torch_api.patches import Patches

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
        if (known := self.seconds_of()) is not None:
            seconds = known
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
