"""Where a step went, in parts that add up to it, and which changes could gain by it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from virtualgpu.environment import Settings
from virtualgpu.hardware import specs
from virtualgpu.hardware.datasheet import Spec
from virtualgpu.hardware.specs import SPECS
from virtualgpu.run import results
from virtualgpu.timing.trace import Span

# -- Where a step went, by what one GPU did from its beginning to its end: parts that add up to it.
#
# A moment in which a kernel computes is computing, by the kind of the kernel. In the others the GPU idles: there a collective may run
# (communication in the open), a copy, or a collective that waits for other ranks; what is left the host spends in the loader, or it has not
# launched the next kernel yet. Communication beside which kernels compute is hidden, and told apart: it is no part of the step.

PARTS = ("communication", "copies", "waiting", "loader", "launches", "other")
COMMUNICATION, COPIES, WAITING, LOADER, LAUNCHES, OTHER = PARTS
OPTIMIZER, ELEMENTWISE = "optimizer", "elementwise and others"
# Kinds of kernels by what is in the operation's name; the first that fits
KINDS = (
    ("casts and copies", ("copy", "clone", "chunk_cat")),
    ("attention", ("attention", "flex")),
    ("convolutions", ("conv",)),
    ("recurrent layers", ("rnn", "lstm", "gru")),
    ("softmax and loss", ("softmax", "loss", "entropy")),
    ("normalization", ("batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm")),
    ("embedding and indexing", ("embedding", "index", "gather", "scatter", "nonzero", "topk", "sort")),
)
PRODUCTS = "matrix products"
MULTIPLY = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul", "addr", "ger"}
MULTIPLY |= {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_addmm_activation", "_int_mm", "outer"}
NAMES = (PRODUCTS, *(name for name, _ in KINDS), ELEMENTWISE, OPTIMIZER)
PAUSE = 1e-6  # seconds: one kernel after the other (engine.machine.GAP) counts with the other
BETWEEN = "copy cuda:"  # how the clock calls a copy from one GPU to another
Interval = tuple[float, float]


class Parts(NamedTuple):
    """Of one step on one GPU, in seconds. computing: by kind of kernel. idle: by cause, of PARTS; with computing they add up to `step`.
    hidden: communication beside which kernels computed."""

    step: float
    computing: dict[str, float]
    idle: dict[str, float]
    hidden: float

    @property
    def work(self) -> float:
        """What this rank takes by itself: all but communication and waiting for others."""
        return self.step - sum(self.idle.get(name, 0.0) for name in (COMMUNICATION, WAITING, OTHER))


def kind_of(span: Span) -> str:
    """The name of a kernel's kind, one of NAMES."""
    if span.kind == "optimizer":
        return OPTIMIZER
    name = span.name.partition(".")[0]
    if name in MULTIPLY:
        return PRODUCTS
    return next((kind for kind, words in KINDS if any(word in name for word in words)), ELEMENTWISE)


def parts(spans: Iterable[Span], loading: Iterable[Interval], begin: float, end: float) -> Parts:
    """Of one GPU between two moments. spans: all that it did, also before and after. loading: when the host was in the loader."""
    kernels: list[Span] = []
    concurrent: dict[str, list[Span]] = {"communication": [], "copy": [], "waiting": []}
    for span in spans:
        if span.end > begin and (span.start < end or span.kind not in concurrent):
            kind = "communication" if span.name.startswith(BETWEEN) else span.kind
            concurrent.get(kind, kernels).append(span)
    kernels.sort(key=lambda span: span.start)
    computing: dict[str, float] = {}
    gaps, cursor = [], begin  # a gap: from, to, and until when the host had not launched what follows
    for span in kernels:
        start = cursor if 0 < span.start - cursor <= PAUSE else span.start
        if start > cursor:
            gaps.append((cursor, min(start, end), min(span.issued or end, end)))
        if start >= end:
            cursor = end
            break
        seconds = min(span.end, end) - max(start, cursor)
        if seconds > 0:
            kind = kind_of(span)
            computing[kind] = computing.get(kind, 0.0) + seconds
        cursor = max(cursor, min(span.end, end))
    if cursor < end:
        gaps.append((cursor, end, end))
    causes = {
        COMMUNICATION: _merged((span.start, span.end) for span in concurrent["communication"]),
        COPIES: _merged((span.start, span.end) for span in concurrent["copy"]),
        WAITING: _merged((span.start, span.end) for span in concurrent["waiting"]),
        LOADER: _merged(loading),
        LAUNCHES: [(start, issued) for start, _, issued in gaps if issued > start],
    }
    remaining, idle = [(start, until) for start, until, _ in gaps], {}
    for name, intervals in causes.items():
        idle[name], remaining = _split(remaining, intervals)
    idle[OTHER] = sum(until - start for start, until in remaining)
    total = sum(min(until, end) - max(start, begin) for start, until in causes[COMMUNICATION])
    return Parts(end - begin, computing, idle, max(0.0, total - idle[COMMUNICATION]))


def mean(steps: Sequence[Parts]) -> Parts:
    """Of several steps, or of several ranks' steps."""

    def of(values: Sequence[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for value in values for name in value)
        return {name: sum(value.get(name, 0.0) for value in values) / len(values) for name in names}

    return Parts(
        sum(step.step for step in steps) / len(steps),
        of([step.computing for step in steps]),
        of([step.idle for step in steps]),
        sum(step.hidden for step in steps) / len(steps),
    )


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, and none of them over another."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def _split(gaps: list[Interval], intervals: list[Interval]) -> tuple[float, list[Interval]]:
    """How much of the gaps the intervals cover, and what is left of them. Both are in order, and overlap nothing of their own."""
    taken, remaining, index = 0.0, [], 0
    for start, end in gaps:
        while index < len(intervals) and intervals[index][1] <= start:
            index += 1
        while index < len(intervals) and intervals[index][0] < end:
            first, last = max(start, intervals[index][0]), min(end, intervals[index][1])
            if first > start:
                remaining.append((start, first))
            taken, start = taken + last - first, last
            if intervals[index][1] > end:
                break
            index += 1
        if start < end:
            remaining.append((start, end))
    return taken, remaining


# -- What each process of `--explain` leaves for the runner, which reads it without PyTorch (`watch` makes it).


LEFT = "explained"


class Explained(NamedTuple):
    """One process's. gpus: {index: its steps}. bucket_cap: DDP's smallest, in MB; None without DDP. compressible: DDP sends gradients of float32,
    without a hook of the program's. half: it has parameters in half precision, or autocasts. tf32: products of float32 are in TF32. batch:
    seconds of the loader."""

    rank: int
    gpus: dict[str, list[Parts]]
    bucket_cap: float | None
    compressible: bool
    half: bool
    tf32: bool
    batch: float | None


def collect(folder: str) -> list[Explained]:
    """What the processes left that stepped, by rank."""
    processes = [Explained(*record) for _, record in results.collect(folder, LEFT) if record is not None]
    restored = [
        one._replace(gpus={gpu: [Parts(*step) for step in own] for gpu, own in one.gpus.items()}) for one in processes
    ]
    return sorted((one for one in restored if one.gpus), key=lambda one: one.rank)


# -- A card that has no NVLink, with it: what `--explain` asks for, and the run with that change has.


NVLINKS = {6: "P100-SXM2", 7: "V100", 8: "A100", 9: "H100"}  # by the first number of the capability; later ones: B200


def nvlinked(spec: Spec, gpus: int) -> tuple[Spec, str]:
    """The card with NVLink, and a word for it: its own bridge, where there is one for so many; otherwise the links of the server
    card of its generation. Raises ValueError for a card that has NVLink."""
    if spec.nvlink is not None:
        raise ValueError(f"{spec.name} has NVLink")
    try:
        bridged, why = specs.bridged(spec), "its bridge joins two"
        if gpus == 2:
            return bridged, "NVLink (the bridge of two such cards)"
    except ValueError:
        why = "this card takes none"
    like = NVLINKS.get(spec.capability[0], "B200")
    article, other = "an" if like[0] in "AH" else "a", SPECS[like]
    linked = replace(spec, nvlink=other.nvlink, peer=other.peer, peer_access=True)
    return linked, f"NVLink as {article} {like} has it ({why})"


# -- Which changes `--explain` tries: those that what it found could gain by. A part under a fiftieth of the step cannot.


LEAST = 0.02  # of the step
DEFAULT_BUCKET = 25  # MB: DistributedDataParallel's bucket_cap_mb where a program says none
LARGE_BUCKET = 100  # MB
COMPUTING = "computing"


class Change(NamedTuple):
    """name: for machines. words: as a sentence begins. cause: the part of the step that it is about. setting: for `watch`. bound: it cannot be
    had, but tells how much there is to gain."""

    name: str
    words: str
    cause: str
    setting: Mapping = MappingProxyType({})
    bound: bool = False


def candidates(explained: Sequence[Explained], settings: Settings) -> list[Change]:
    """What is worth a run, after a first one that came to this."""
    shares = _shares(explained)
    changes: list[Change] = []
    if shares[LAUNCHES] >= LEAST:
        words = "With launches that cost nothing (CUDA graphs and torch.compile come near to it)"
        changes.append(Change("no launches", words, LAUNCHES, {"launches": 0}))
    if shares[COMMUNICATION] >= LEAST:
        changes += _communication(explained, settings)
    if shares[COMPUTING] >= LEAST and not any(one.half for one in explained):
        changes += _precision(explained, specs.find_spec(settings.cards[0].like))
    if shares[WAITING] >= LEAST and len(explained) > 1:
        words = "With equal work for all ranks"
        changes.append(Change("equal ranks", words, WAITING, {"factors": _factors(explained)}))
    if shares[LOADER] >= LEAST:
        changes.append(Change("no loader", "With a loader that keeps up", LOADER, {"loader": 0}))
    return [change._replace(setting={**change.setting, "batches": _batches(explained, change)}) for change in changes]


def _shares(explained: Sequence[Explained]) -> dict[str, float]:
    """Of each part: the largest share of any GPU's step."""
    shares = dict.fromkeys((COMPUTING, COMMUNICATION, WAITING, LOADER, LAUNCHES), 0.0)
    for one in explained:
        for steps in one.gpus.values():
            length = sum(step.step for step in steps) or 1.0
            for name in shares:
                shares[name] = max(shares[name], sum(amount(step, name) for step in steps) / length)
    return shares


def amount(parts: Parts, name: str) -> float:
    """Seconds of one part; COMPUTING is all kinds of kernels together."""
    return sum(parts.computing.values()) if name == COMPUTING else parts.idle.get(name, 0.0)


def _communication(explained: Sequence[Explained], settings: Settings) -> list[Change]:
    changes = [Change("no communication", "Without any communication", COMMUNICATION, {"communication": 0}, bound=True)]
    spec = specs.find_spec(settings.cards[0].like)
    if spec.nvlink is None:
        gpus = settings.gpus_per_node or len(settings.cards)
        if settings.single_rank:
            world_size, _, per_node = settings.single_rank
            gpus = min(world_size, per_node)
        changes.append(Change("NVLink", f"Over {nvlinked(spec, gpus)[1]}", COMMUNICATION, {"link": gpus}))
    caps = [one.bucket_cap for one in explained if one.bucket_cap is not None]
    if caps:
        is_small = min(caps) < DEFAULT_BUCKET
        how, megabytes = ("DDP's own", DEFAULT_BUCKET) if is_small else ("larger", LARGE_BUCKET)
        words = f"With {how} buckets (bucket_cap_mb={megabytes})"
        changes.append(Change("larger buckets", words, COMMUNICATION, {"buckets": None if is_small else megabytes}))
    if any(one.compressible for one in explained):
        words = "With gradients sent in half precision (DDP's fp16_compress_hook)"
        changes.append(Change("half gradients", words, COMMUNICATION, {"compress": 1}))
    return changes


def _precision(explained: Sequence[Explained], spec: Spec) -> list[Change]:
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
    """Of each rank: what a batch takes its loader, in seconds."""
    factors = change.setting.get("factors", {})
    return {
        rank: one.batch * factors.get(rank, [1.0])[0]
        for one in explained
        if one.batch is not None
        for rank in [str(max(0, one.rank))]
    }
