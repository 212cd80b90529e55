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

from virtualgpu import _compat

SUFFIX = ".fetched"
NUMBER = struct.Struct("d")


class Loader:
    """Of this process. seconds_of: says the seconds of a batch, as an earlier run measured them; None: they are measured. loading: from when to when, on
    the simulated clock, the host waited for a batch. folder: where workers leave what they took."""

    def __init__(self, machine, folder: str, seconds_of: Callable[[], float | None]):
        from torch.utils.data import DataLoader

        self.machine, self.folder, self.seconds_of = machine, folder, seconds_of
        self.loading: list[tuple[float, float]] = []
        self.seconds: list[float] = []  # of each batch
        self.workers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each iterator that has some
        begin, iterators = DataLoader.__iter__, _compat.loader_iterator()
        following = iterators.__next__

        def __iter__(loader):
            iterator = begin(loader)
            if loader.num_workers:
                ahead = loader.num_workers * (loader.prefetch_factor or 2)
                self.workers[iterator] = _Workers(loader.num_workers, ahead, self._now())
            return iterator

        def __next__(iterator):
            start = time.perf_counter()
            batch = following(iterator)
            self._came(self.workers.get(iterator), time.perf_counter() - start)
            return batch

        DataLoader.__iter__, iterators.__next__ = __iter__, __next__
        for fetcher in _compat.fetchers():
            fetcher.fetch = _timed(fetcher.fetch, folder)

    def _now(self) -> float:
        return self.machine.clock.host

    def _came(self, workers: "_Workers | None", seconds: float) -> None:
        now, known = self._now(), self.seconds_of()
        if known is not None:
            seconds = known
        elif workers is not None:
            seconds = self._fetched(seconds)
        until = now + seconds if workers is None else workers.ready(now, seconds)
        self.seconds.append(seconds)
        if until > now:
            self.loading.append((now, until))
            self.machine.clock.wait_until(until)

    def _fetched(self, otherwise: float) -> float:
        """What this process's workers have taken for a batch so far: the median, which the first ones do not move."""
        taken = []
        for path in Path(self.folder).glob(f"{os.getpid()}.*{SUFFIX}"):
            data = path.read_bytes()
            taken += [value for (value,) in NUMBER.iter_unpack(data[: len(data) // NUMBER.size * NUMBER.size])]
        return statistics.median(taken) if taken else otherwise


class _Workers:
    """Of one iterator, on the simulated clock. ahead: batches that are asked for before they are needed."""

    def __init__(self, count: int, ahead: int, now: float):
        self.count, self.last = count, now
        self.asked = deque([now] * ahead)

    def ready(self, now: float, seconds: float) -> float:
        """When the next batch is there; one more is asked for then."""
        self.last = max(self.last + seconds / self.count, self.asked.popleft() + seconds)
        self.asked.append(max(now, self.last))
        return self.last


def _timed(fetch, folder: str):
    def timed(*args):
        start = time.perf_counter()
        batch = fetch(*args)
        parent = multiprocessing.parent_process()
        if _compat.in_loader_worker() and parent is not None:
            name = os.path.join(folder, f"{parent.pid}.{os.getpid()}{SUFFIX}")
            with open(name, "ab", buffering=0) as file:
                file.write(NUMBER.pack(time.perf_counter() - start))
        return batch

    return timed
