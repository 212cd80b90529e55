"""What a run of `--explain` has otherwise, in each of its processes: one change, to see what the step would gain by it.

`Settings.explain` says it; nothing of the program is changed but by these:

    launches: 0            the host launches in no time, as CUDA graphs come near to
    link: "nvlink"         GPUs are joined by NVLink (`nvlinked` says of which card)
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

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from virtualgpu.hardware import bridges
from virtualgpu.hardware.datasheet import Link, Spec
from virtualgpu.hardware.hosts import FREE, Host
from virtualgpu.hardware.specs import SPECS

DEFAULT_BUCKET = 25  # MB: DistributedDataParallel's bucket_cap_mb where a program says none
NVLINKS = {6: "P100-SXM2", 7: "V100", 8: "A100", 9: "H100"}  # by the first number of the capability; later ones: B200


def nvlinked(spec: Spec, gpus: int) -> tuple[Spec, str]:
    """The card with NVLink, and a word for it: its own bridge, where there is one for so many; otherwise the links of the server
    card of its generation. Raises ValueError for a card that has NVLink."""
    if spec.nvlink is not None:
        raise ValueError(f"{spec.name} has NVLink")
    try:
        bridged, why = bridges.bridged(spec), "its bridge joins two"
        if gpus == 2:
            return bridged, "NVLink (the bridge of two such cards)"
    except ValueError:
        why = "this card takes none"
    like = NVLINKS.get(spec.capability[0], "B200")
    article, other = "an" if like[0] in "AH" else "a", SPECS[like]
    linked = replace(spec, nvlink=other.nvlink, peer=other.peer, peer_access=True)
    return linked, f"NVLink as {article} {like} has it ({why})"


def cards(change: Mapping, specs: Sequence[Spec]) -> list[Spec]:
    """The machine's, as the change has them."""
    if change.get("link") == "nvlink":
        return [spec if spec.nvlink else nvlinked(spec, len(specs))[0] for spec in specs]
    if "communication" in change:
        return [replace(spec, peer=Link(float("inf"), 0.0)) for spec in specs]
    return list(specs)


def apply(change: Mapping, machine, rank: Callable[[], int]) -> Callable[[int], None]:
    """Before the program begins. What it returns is called before each step, numbered from 0."""
    clock, before = machine.clock, []
    if "launches" in change:
        clock.costs = FREE
    if "communication" in change:
        _lasting(lambda real, kind, nbytes: 0.0)
    if "together" in change:
        table = change["together"]
        _lasting(lambda real, kind, nbytes: _share(real, kind, nbytes, table.get(kind, 0)))
    if "buckets" in change:
        bucketed(lambda megabytes: change["buckets"])
    if "compress" in change:
        made(_compress)
    if "half" in change:
        torch.set_autocast_dtype("cuda", getattr(torch, change["half"]))
        torch.set_autocast_enabled("cuda", True)
        before.append(lambda step: torch.clear_autocast_cache())
    if "tf32" in change:
        before.append(lambda step: torch.set_float32_matmul_precision("high"))
    if "copies" in change:
        real = clock.host_copy
        clock.host_copy = lambda gpu, seconds, wait, name, way: real(
            gpu, seconds * (way != "in"), wait and way != "in", name, way
        )
    if "factors" in change:
        before.append(_scaled(clock, lambda: of_rank(change["factors"], rank())))

    def step(number: int) -> None:
        for function in before:
            function(number)

    return step


def of_rank(table: Mapping, rank: int):
    """What the table has for that rank, or for the one process without a rank (-1); None where it has nothing."""
    return table.get(str(max(0, rank)))


def _lasting(seconds: Callable) -> None:
    """A collective lasts what this says, of what it really would, its kind and its bytes."""
    from virtualgpu.distributed.nodes import Layout

    real, message = Layout.seconds, Layout.message
    Layout.seconds = lambda layout, kind, nbytes: seconds(lambda n: real(layout, kind, n), kind, nbytes)
    Layout.message = lambda layout, nbytes, rank, peer: seconds(lambda n: message(layout, n, rank, peer), "p2p", nbytes)


def _share(real: Callable[[int], float], kind: str, nbytes: int, whole: int) -> float:
    return real(whole) * nbytes / whole if whole > nbytes else real(nbytes)


def made(then: Callable) -> None:
    """Each DistributedDataParallel is given to this."""
    from torch.nn.parallel import DistributedDataParallel

    real = DistributedDataParallel.__init__

    @functools.wraps(real)
    def __init__(ddp, *args, **kwargs):
        real(ddp, *args, **kwargs)
        then(ddp)

    DistributedDataParallel.__init__ = __init__


def _compress(ddp) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp.register_comm_hook(None, fp16_compress_hook)


def bucketed(cap: Callable) -> None:
    """DistributedDataParallel's bucket_cap_mb is what this says of the program's (None: PyTorch's own)."""
    from torch.nn.parallel import DistributedDataParallel

    real = DistributedDataParallel.__init__
    signature = inspect.signature(real)

    @functools.wraps(real)
    def __init__(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments["bucket_cap_mb"] = cap(bound.arguments["bucket_cap_mb"])
        real(*bound.args, **bound.kwargs)

    DistributedDataParallel.__init__ = __init__


def _scaled(clock, factors: Callable[[], Sequence[float] | None]) -> Callable[[int], None]:
    """Kernels, copies from and to the host and launches take this, times what they do."""
    launch, copy, costs, now = clock.launch, clock.host_copy, clock.costs, [1.0]

    def scaled_launch(gpu, seconds, name, after=0.0, more=0.0):
        return launch(gpu, seconds * now[0], name, after, more)

    def scaled_copy(gpu, seconds, *args):
        return copy(gpu, seconds * now[0], *args)

    clock.launch, clock.host_copy = scaled_launch, scaled_copy

    def before(step: int) -> None:
        own = factors() or [1.0]
        now[0] = own[min(step, len(own) - 1)]
        clock.costs = Host(*[value * now[0] if isinstance(value, float) else value for value in costs])

    return before
