"""In each process of `--explain`: what its GPUs did in each step, left for the runner; with one change, to see what the step would gain by it."""

import inspect
import itertools
import multiprocessing
import os
import statistics
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from virtualgpu.hardware.datasheet import Link, Spec
from virtualgpu.hardware.machine import FREE, Host
from virtualgpu.run import results, steps
from virtualgpu.run.explain.changes import LEFT, Explained, nvlinked, parts
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.trace import Recording
from virtualgpu.torch_api.host_time import measuring
from virtualgpu.torch_api.patches import Patches


class Watch(steps.Watch):
    """As the one of steps, which ends the program; and with it all that is left here."""

    def __init__(self, machine, most: int, change: dict, folder: str):
        super().__init__(machine, most)
        batches, patches = change.get("batches", {}), Patches()
        self.rank = environment.rank()
        self.loader = Loader(machine, patches, folder, lambda: 0.0 if "loader" in change else of_rank(batches, rank()))
        self.half = False
        self.wrapped: list[DistributedDataParallel] = []
        self.batches_loaded: list[int] = []  # until the end of each step
        register_module_forward_pre_hook(self._note_module)
        self.before_step = apply(change, machine, patches)
        machine.clock.record(Recording())
        self.before_step(0)

    def on_step(self) -> None:
        """A step was made. What the first one did is nobody's to tell: it makes the optimizer's state."""
        super().on_step()
        self.rank = rank()
        if self.count == 1:
            self.machine.clock.record(Recording())
        self.batches_loaded.append(len(self.loader.seconds))
        self.before_step(self.count)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.batches_loaded = []

    def leave(self, folder: str) -> None:
        """For `changes.collect`; and what `steps` leaves."""
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

    def _compressible(self) -> bool:
        unhooked = (ddp for ddp in self.wrapped if not comm_hooks(ddp))
        parameters = itertools.chain.from_iterable(ddp.parameters() for ddp in unhooked)
        return any(parameter.dtype == torch.float32 for parameter in parameters if parameter.requires_grad)

    def _batch(self, first: int) -> float | None:
        """Seconds, on average; None where the program has no loader."""
        loaded = self.batches_loaded[first:]
        taken = self.loader.seconds[loaded[0] : loaded[-1]] if loaded else []
        return statistics.fmean(taken) if taken else None


def rank() -> int:
    """Of this process, as far as it knows by now: of its process group, or its launcher's word; -1 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else environment.rank()


# -- One change. `Settings.explain` says it; nothing of the program is changed but by these:
#
#     launches: 0            the host launches in no time, as CUDA graphs come near to
#     link: 2                so many GPUs of a node are joined by NVLink (`changes` says of which card)
#     communication: 0       collectives and copies between GPUs take no time
#     buckets: 100           DistributedDataParallel's bucket_cap_mb; None: PyTorch's own
#     compress: 1            DistributedDataParallel sends gradients by fp16_compress_hook
#     half: "float16"        autocast, around all of the program
#     tf32: 1                products of float32 in TF32
#     factors: {rank: [...]} each rank's own work in its steps, times this
#     loader: 0              a batch is there when it is asked for
#     batches: {rank: s}     what a batch takes the loader, as an earlier run measured it


def cards(change: Mapping, specs: Sequence[Spec]) -> list[Spec]:
    """The machine's, as the change has them."""
    if "link" in change:
        return [spec if spec.nvlink else nvlinked(spec, change["link"])[0] for spec in specs]
    if "communication" in change:
        return [replace(spec, peer=Link(float("inf"), 0.0)) for spec in specs]
    return list(specs)


def apply(change: Mapping, machine, patches: Patches) -> Callable[[int], None]:
    """Before the program begins. What it returns is called before each step, numbered from 0."""
    clock, costs = machine.clock, machine.clock.costs
    if "launches" in change:
        clock.set(costs=FREE)
    if "communication" in change:
        Layout.duration = staticmethod(lambda kind, nbytes, **layout: 0.0)
    if "buckets" in change:
        patches.stand_in(DistributedDataParallel, "__init__", _bucketed, change["buckets"])
    if "compress" in change:
        register_module_forward_pre_hook(_compress)
    if "half" in change:
        torch.set_autocast_dtype("cuda", getattr(torch, change["half"]))
        torch.set_autocast_enabled("cuda", True)

    def before_step(number: int) -> None:
        if "half" in change:
            torch.clear_autocast_cache()
        if "tf32" in change:
            torch.set_float32_matmul_precision("high")
        if "factors" in change:
            factors = of_rank(change["factors"], rank()) or [1.0]
            factor = factors[min(number, len(factors) - 1)]
            clock.become(ScaledClock, factor=factor)
            clock.set(costs=Host(*[value * factor if isinstance(value, float) else value for value in costs]))

    return before_step


def of_rank(table: Mapping, rank: int):
    """What the table has for that rank, or for the one process without a rank (-1); None where it has nothing."""
    return table.get(str(max(0, rank)))


class ScaledClock(Clock):
    """Kernels and copies from and to the host take `factor` times as long."""

    factor = 1.0

    def launch(self, gpu: int, seconds: float, *args, **kwargs) -> float:
        """As the clock's."""
        return super().launch(gpu, seconds * self.factor, *args, **kwargs)

    def host_copy(self, gpu: int, seconds: float, *args, **kwargs) -> None:
        """As the clock's."""
        super().host_copy(gpu, seconds * self.factor, *args, **kwargs)


def _compress(module: torch.nn.Module, _) -> None:
    """Before each module's forward."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    if isinstance(module, DistributedDataParallel) and not comm_hooks(module):
        module.register_comm_hook(None, fp16_compress_hook)


def _bucketed(megabytes: float | None, original: Callable, *args, **kwargs) -> None:
    """In place of DistributedDataParallel's constructor: there is no other time for it, and no hook."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["bucket_cap_mb"] = megabytes
    original(*bound.args, **bound.kwargs)


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
