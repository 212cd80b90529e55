"""Which changes `--explain` tries: those that what it found could gain by. A part under a fiftieth of the step cannot."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.environment import Settings
from virtualgpu.run.explain.explained import Explained
from virtualgpu.run.explain.nvlink import nvlinked
from virtualgpu.run.explain.parts import COMMUNICATION, COPIES, LAUNCHES, LOADER, WAITING, Parts

LEAST = 0.02  # of the step
DEFAULT_BUCKET = 25  # MB: DistributedDataParallel's bucket_cap_mb where a program says none
LARGE_BUCKET = 100  # MB
COMPUTING = "computing"
FASTEST = "InfiniBand NDR"
P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")


class Change(NamedTuple):
    """name: for machines. words: as a sentence begins. cause: the part of the step that it is about. setting: for changes.
    without: variables that the program does not get. bound: it cannot be had, but tells how much there is to gain."""

    name: str
    words: str
    cause: str
    setting: Mapping = MappingProxyType({})
    without: tuple[str, ...] = ()
    network: str | None = None
    bound: bool = False

    def of(self, settings: Settings) -> Settings:
        """The first run's settings, changed."""
        return settings._replace(explain=dict(self.setting), network=self.network or settings.network)


def candidates(explained: Sequence[Explained], settings: Settings, environ: Mapping[str, str]) -> list[Change]:
    """What is worth a run, after a first one that came to this."""
    shares = _shares(explained)
    changes: list[Change] = []
    if shares[LAUNCHES] >= LEAST:
        words = "With launches that cost nothing (CUDA graphs and torch.compile come near to it)"
        changes.append(Change("no launches", words, LAUNCHES, {"launches": 0}))
    if shares[COMMUNICATION] >= LEAST:
        changes += _communication(explained, settings, environ)
    if shares[COMPUTING] >= LEAST:
        changes += _precision(explained, settings)
    if shares[WAITING] >= LEAST and len(explained) > 1:
        changes.append(
            Change("equal ranks", "With equal work for all ranks", WAITING, {"factors": _factors(explained)})
        )
    if shares[LOADER] >= LEAST:
        changes.append(Change("no loader", "With a loader that keeps up", LOADER, {"loader": 0}))
    if shares[COPIES] >= LEAST:
        words = "With copies from the host in the background (pinned memory, on a stream of their own)"
        changes.append(Change("copies ahead", words, COPIES, {"copies": 0}))
    return [change._replace(setting={**change.setting, "batches": _batches(explained, change)}) for change in changes]


def _shares(explained: Sequence[Explained]) -> dict[str, float]:
    """Of each part: the largest share of any GPU's step."""
    shares = dict.fromkeys((COMPUTING, COMMUNICATION, COPIES, WAITING, LOADER, LAUNCHES), 0.0)
    for one in explained:
        for steps in one.gpus.values():
            length = sum(step.step for step in steps) or 1.0
            for name in shares:
                shares[name] = max(shares[name], sum(amount(step, name) for step in steps) / length)
    return shares


def amount(parts: Parts, name: str) -> float:
    """Seconds of one part; COMPUTING is all kinds of kernels together."""
    return sum(parts.computing.values()) if name == COMPUTING else parts.idle.get(name, 0.0)


def _communication(explained: Sequence[Explained], settings: Settings, environ: Mapping[str, str]) -> list[Change]:
    from virtualgpu.hardware import specs

    changes = [Change("no communication", "Without any communication", COMMUNICATION, {"communication": 0}, bound=True)]
    spec = specs.find(settings.cards[0].like)
    if environment.peer_to_peer(environ) == "LOC" and spec.nvlink:
        names = " and ".join(name for name in P2P if name in environ)
        changes.append(Change("peer to peer", f"Without {names} in the environment", COMMUNICATION, without=P2P))
    elif spec.nvlink is None:
        gpus = settings.gpus_per_node or len(settings.cards)
        if settings.single_rank:
            world_size, _, per_node = settings.single_rank
            gpus = min(world_size, per_node)
        changes.append(Change("NVLink", f"Over {nvlinked(spec, gpus)[1]}", COMMUNICATION, {"link": gpus}))
    if settings.network is not None and settings.network != FASTEST:
        changes.append(Change("network", f"Over {FASTEST} between nodes", COMMUNICATION, network=FASTEST))
    caps = [one.bucket_cap for one in explained if one.bucket_cap is not None]
    if caps and min(caps) < DEFAULT_BUCKET:
        words = f"With DDP's own buckets (bucket_cap_mb={DEFAULT_BUCKET})"
        changes.append(Change("larger buckets", words, COMMUNICATION, {"buckets": None}))
    elif caps:
        words = f"With larger buckets (bucket_cap_mb={LARGE_BUCKET})"
        changes.append(Change("larger buckets", words, COMMUNICATION, {"buckets": LARGE_BUCKET}))
    elif together := _together(explained):
        words = "With one large collective in place of many small ones"
        changes.append(Change("fewer collectives", words, COMMUNICATION, {"together": together}))
    if any(one.compressible for one in explained):
        words = "With gradients sent in half precision (DDP's fp16_compress_hook)"
        changes.append(Change("half gradients", words, COMMUNICATION, {"compress": 1}))
    return changes


def _together(explained: Sequence[Explained]) -> dict[str, int]:
    """Bytes a step of each kind of collective that is small, and would be faster as one, where that could gain."""
    step = min(parts.step for one in explained for steps in one.gpus.values() for parts in steps)
    together = {}
    for one in explained:
        for kind, (count, nbytes, seconds, as_one) in one.together.items():
            small = nbytes < count * DEFAULT_BUCKET * (1 << 20)
            if small and count >= 2 and seconds - as_one >= LEAST * step:
                together[kind] = int(nbytes)
    return together


def _precision(explained: Sequence[Explained], settings: Settings) -> list[Change]:
    from virtualgpu.hardware import specs

    if any(one.half for one in explained):
        return []
    spec = specs.find(settings.cards[0].like)
    half = "bfloat16" if spec.capability >= (8, 0) else "float16"
    changes = [Change("half precision", f"In half precision (torch.autocast, {half})", COMPUTING, {"half": half})]
    if spec.rates.get(specs.TF32, 0.0) > spec.rates[specs.FLOAT32] and not any(one.tf32 for one in explained):
        words = 'With products in TF32 (torch.set_float32_matmul_precision("high"))'
        changes.append(Change("TF32", words, COMPUTING, {"tf32": 1}))
    return changes


def _factors(explained: Sequence[Explained]) -> dict[str, list[float]]:
    """For each rank and step: the mean of all ranks' work over its own."""
    works = [[max(parts.work for parts in step) for step in zip(*one.gpus.values(), strict=True)] for one in explained]
    steps = min(map(len, works))
    means = [sum(work[index] for work in works) / len(works) for index in range(steps)]
    factors = {}
    for one, work in zip(explained, works, strict=True):
        own = [means[index] / work[index] if work[index] else 1.0 for index in range(steps)]
        factors[str(max(0, one.rank))] = [sum(own) / len(own)] * 2 + own  # the first two steps are not told of
    return factors


def _batches(explained: Sequence[Explained], change: Change) -> dict[str, float]:
    factors = change.setting.get("factors", {})
    batches = {}
    for one in explained:
        rank = str(max(0, one.rank))
        if one.batch is not None:
            batches[rank] = one.batch * factors.get(rank, [1.0])[0]
    return batches
