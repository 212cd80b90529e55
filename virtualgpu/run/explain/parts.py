"""Where a step went, by what one GPU did from its beginning to its end: parts that add up to it.

A moment in which a kernel computes is computing, by the kind of the kernel. In the others the GPU idles: there a collective may run
(communication in the open), a copy, or a collective that waits for other ranks; what is left the host spends in the loader, or it has not
launched the next kernel yet. Communication beside which kernels compute is hidden, and told apart: it is no part of the step.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from virtualgpu.timing.trace import Span

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
    beside: dict[str, list[Span]] = {"communication": [], "copy": [], "waiting": []}
    for span in spans:
        if span.end > begin and (span.start < end or span.kind not in beside):
            kind = "communication" if span.name.startswith(BETWEEN) else span.kind
            beside.get(kind, kernels).append(span)
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
        COMMUNICATION: _merged((span.start, span.end) for span in beside["communication"]),
        COPIES: _merged((span.start, span.end) for span in beside["copy"]),
        WAITING: _merged((span.start, span.end) for span in beside["waiting"]),
        LOADER: _merged(loading),
        LAUNCHES: [(start, issued) for start, _, issued in gaps if issued > start],
    }
    left, idle = [(start, until) for start, until, _ in gaps], {}
    for name, intervals in causes.items():
        idle[name], left = _split(left, intervals)
    idle[OTHER] = sum(until - start for start, until in left)
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
    taken, left, index = 0.0, [], 0
    for start, end in gaps:
        while index < len(intervals) and intervals[index][1] <= start:
            index += 1
        while index < len(intervals) and intervals[index][0] < end:
            first, last = max(start, intervals[index][0]), min(end, intervals[index][1])
            if first > start:
                left.append((start, first))
            taken, start = taken + last - first, last
            if intervals[index][1] > end:
                break
            index += 1
        if start < end:
            left.append((start, end))
    return taken, left
