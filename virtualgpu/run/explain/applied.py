"""What a run of `--explain` has otherwise, in each of its processes: one change, to see what the step would gain by it.

`Settings.explain` says it; nothing of the program is changed but by these:

    launches: 0            the host launches in no time, as CUDA graphs come near to
    link: 2                so many GPUs of a node are joined by NVLink (`changes` says of which card)
    communication: 0       collectives and copies between GPUs take no time
    buckets: 100           DistributedDataParallel's bucket_cap_mb; None: PyTorch's own
    compress: 1            DistributedDataParallel sends gradients by fp16_compress_hook
    together: {kind: n}    a collective takes its share of one with so many bytes
    half: "float16"        autocast, around all of the program
    tf32: 1                products of float32 in TF32
    copies: 0              copies from the host take no time
    factors: {rank: [...]} each rank's own work in its steps, times this
    loader: 0              a batch is there when it is asked for
    batches: {rank: s}     what a batch takes the loader, as an earlier run measured it
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from virtualgpu._compat import distributed as _compat
from virtualgpu.hardware.datasheet import Link, Spec
from virtualgpu.hardware.machine import FREE, Host
from virtualgpu.run.explain.changes import nvlinked
from virtualgpu.timing.clock import Clock
from virtualgpu.torch_api.patches import Patches


def cards(change: Mapping, specs: Sequence[Spec]) -> list[Spec]:
    """The machine's, as the change has them."""
    if "link" in change:
        return [spec if spec.nvlink else nvlinked(spec, change["link"])[0] for spec in specs]
    if "communication" in change:
        return [replace(spec, peer=Link(float("inf"), 0.0)) for spec in specs]
    return list(specs)


def apply(change: Mapping, machine, patches: Patches, rank: Callable[[], int]) -> Callable[[int], None]:
    """Before the program begins. What it returns is called before each step, numbered from 0."""
    clock, before = machine.clock, []
    if "launches" in change:
        clock.set(costs=FREE)
    if "buckets" in change:
        patches.stand_in(DistributedDataParallel, "__init__", _bucketed, change["buckets"])
    if "compress" in change:
        register_module_forward_pre_hook(_compress)
    if "half" in change:
        torch.set_autocast_dtype("cuda", getattr(torch, change["half"]))
        torch.set_autocast_enabled("cuda", True)
        before.append(lambda step: torch.clear_autocast_cache())
    if "tf32" in change:
        before.append(lambda step: torch.set_float32_matmul_precision("high"))
    if "copies" in change or "factors" in change:
        clock.become(ChangedClock, copies_ahead="copies" in change)
    if "factors" in change:
        costs = clock.costs

        def scale(step: int) -> None:
            factors = of_rank(change["factors"], rank()) or [1.0]
            factor = factors[min(step, len(factors) - 1)]
            clock.become(ChangedClock, factor=factor)
            clock.set(costs=Host(*[value * factor if isinstance(value, float) else value for value in costs]))

        before.append(scale)

    def step(number: int) -> None:
        for function in before:
            function(number)

    return step


def of_rank(table: Mapping, rank: int):
    """What the table has for that rank, or for the one process without a rank (-1); None where it has nothing."""
    return table.get(str(max(0, rank)))


def seconds(change: Mapping, kind: str, nbytes: int, real: Callable[[int], float]) -> float:
    """What a collective lasts with the change. real: what one with so many bytes lasts without."""
    if "communication" in change:
        return 0.0
    together = change.get("together", {}).get(kind, 0)
    return real(together) * nbytes / together if together > nbytes else real(nbytes)


class ChangedClock(Clock):
    """Kernels and copies from and to the host take `factor` times as long; copies from the host take no time where they are `ahead`."""

    factor = 1.0
    copies_ahead = False

    def launch(self, gpu: int, seconds: float, *args, **kwargs) -> float:
        """As the clock's."""
        return super().launch(gpu, seconds * self.factor, *args, **kwargs)

    def host_copy(self, gpu: int, seconds: float, wait: bool, name: str, way: str, aloud: bool = True) -> None:
        """As the clock's."""
        takes_time = not self.copies_ahead or way != "in"
        super().host_copy(gpu, seconds * self.factor * takes_time, wait and takes_time, name, way, aloud)


def _compress(module: torch.nn.Module, _) -> None:
    """Before each module's forward."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    if isinstance(module, DistributedDataParallel) and not _compat.comm_hooks(module):
        module.register_comm_hook(None, fp16_compress_hook)


def _bucketed(megabytes: float | None, original: Callable, *args, **kwargs) -> None:
    """In place of DistributedDataParallel's constructor: there is no other time for it, and no hook."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["bucket_cap_mb"] = megabytes
    original(*bound.args, **bound.kwargs)
