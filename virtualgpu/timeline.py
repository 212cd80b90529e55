"""What each GPU does when, in a `with` block: simulated for virtual GPUs, measured by torch.profiler for real ones.

    with Timeline() as timeline:
        ...                         # a step or two
    timeline.rows["cuda:0"]

Ranks of `launch` return what recording() gave them, and the parent puts their rows together: Timeline.of_ranks([...]).
"""

import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from virtualgpu import session
from virtualgpu.session.blocks import recording
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.trace import Span

NOT_COMPUTING = ("copy", "waiting", "communication")  # kinds of spans


class Timeline:
    """What GPUs, ranks or a pipeline's stages did.

    rows: {"cuda:0": [Span, ...], ...}, neighbours of one kind joined, in seconds since the block began. Kinds are forward, backward,
    weight gradient, optimizer, copy, waiting (for the last rank) and communication; kernel where the profiler does not tell them apart.
    seconds: how long the block took, its work included. origin: "simulated", "measured", or "data" for a table on paper.

    Entering it raises RuntimeError where there is no GPU, real or virtual.
    """

    def __init__(self, rows: dict[str, list[Span]] | None = None, seconds: float = 0.0, origin: str = "measured"):
        self.rows, self.seconds, self.origin = rows or {}, seconds, origin

    @classmethod
    def of_ranks(cls, spans: Sequence[Sequence[Span]], origin: str = "measured", number: str = "") -> "Timeline":
        """One row a rank, from what each rank's recording() holds: one clock for all, so that rows compare. Collectives of
        the name `number` stay apart, and are numbered from 0."""
        if number:
            spans = [_numbered(own, number) for own in spans]
        every = [span for own in spans for span in own]
        start, end = min((span.start for span in every), default=0.0), max((span.end for span in every), default=0.0)
        rows = {f"rank {rank}": row(own, start, end - start) for rank, own in enumerate(spans)}
        return cls(rows, end - start, origin)

    @classmethod
    def of_slots(cls, table: Sequence[Sequence[str | None]]) -> "Timeline":
        """One row a stage, from a table on paper: "F3" and "B3" are forward and backward of micro-batch 3, None is a slot
        without work. A slot lasts a millisecond."""
        kinds = {"F": "forward", "B": "backward"}
        rows = {
            f"stage {stage}": [
                Span(stage, slot / 1e3, (slot + 1) / 1e3, kinds[work[0]], work, annotation=f"PP:{stage}{work}")
                for slot, work in enumerate(slots)
                if work is not None
            ]
            for stage, slots in enumerate(table)
        }
        return cls(rows, max(map(len, table), default=0) / 1e3, "data")

    @property
    def idle(self) -> float:
        """Percent of the time in which a GPU computes nothing, all GPUs together."""
        return 100 * (1 - sum(map(computing, self.rows.values())) / (len(self.rows) * self.seconds))

    def __enter__(self) -> "Timeline":
        machine = session.machine()
        if machine is None and not torch.cuda.is_available():
            raise RuntimeError("a timeline needs GPUs, real or virtual: call gpus(2) first")
        self._block = self._measured() if machine is None else self._simulated(machine.clock)
        self._block.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._block.__exit__(*error)

    @contextlib.contextmanager
    def _simulated(self, clock: Clock) -> Iterator[None]:
        """The block begins when the work queued before it is done, and ends with its own."""
        self.origin = "simulated"
        clock.wait()
        start = clock.host
        try:
            with recording() as spans:
                yield
        finally:
            clock.wait()
            self.seconds = clock.host - start
            for gpu in range(len(clock.busy)):
                own = [span for span in spans if span.gpu == gpu]
                self.rows[f"cuda:{gpu}"] = row(own, start, self.seconds)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        self.origin = "measured"
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        every = gpu_spans(_trace(profiler))
        spans = [[span for span in every if span.gpu == gpu] for gpu in range(torch.cuda.device_count())]
        start = min((span.start for own in spans for span in own), default=0.0)
        self.seconds = max((span.end for own in spans for span in own), default=0.0) - start
        self.rows = {f"cuda:{gpu}": row(own, start, self.seconds) for gpu, own in enumerate(spans)}


def computing(spans: Sequence[Span]) -> float:
    """Seconds in which a GPU computes: neither copies nor messages, nor the waiting for them."""
    return sum(span.end - span.start for span in spans if span.kind not in NOT_COMPUTING)


def _numbered(spans: Sequence[Span], name: str) -> list[Span]:
    count = itertools.count()
    return [replace(s, annotation=str(next(count))) if s.name.startswith(name) else s for s in spans]


def _trace(profiler: profile) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        with open(f"{folder}/trace.json", encoding="utf-8") as file:
            return json.load(file)["traceEvents"]


def gpu_spans(events: Sequence[dict]) -> list[Span]:
    """What real GPUs did, of a Chrome trace by torch.profiler ("traceEvents"), in seconds: kernels, those of NCCL (communication) and copies."""
    spans = []
    for event in events:
        if event.get("ph") == "X" and "ts" in event and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args, name, start = event.get("args", {}), event["name"], event["ts"] * 1e-6
            kind = "copy" if event["cat"] == "gpu_memcpy" else "communication" if "nccl" in name.lower() else "kernel"
            end = (event["ts"] + event.get("dur", 0)) * 1e-6
            spans.append(Span(int(args.get("device", 0)), start, end, kind, name, int(args.get("stream", 0))))
    return spans


def row(spans: Sequence[Span], start: float, seconds: float) -> list[Span]:
    """One GPU's spans in the order of time, from `start` on. Neighbours of one kind and annotation become one, where less than a
    2000th of `seconds`, half a pixel of a wide figure, lies between: thousands of kernels, dozens of bars. What a pipeline's
    schedule leaves for later has a kind of its own, "weight gradient"."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        span = replace(span, start=span.start - start, end=span.end - start)
        if (action := PASS.fullmatch(span.annotation)) and action["way"] == "W" and span.kind == "backward":
            span = replace(span, kind="weight gradient")
        alike = joined and (drawn_as(joined[-1]), joined[-1].annotation) == (drawn_as(span), span.annotation)
        if alike and span.start - joined[-1].end <= seconds / 2000:
            joined[-1] = replace(joined[-1], end=max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def drawn_as(span: Span) -> str:
    """The span's kind; of the two collectives that sharding has, their name: one runs ahead of the computing, the other follows it."""
    # NCCL's kernels are called ncclDevKernel_AllGather_RING_LL and the like
    name = span.name.lower().replace("_", "") if span.kind == "communication" else ""
    return next((kind for kind in ("all-gather", "reduce-scatter") if kind.replace("-", "") in name), span.kind)


# How torch.distributed.pipelining.schedules calls a micro-batch's work on a stage: F forward, B backward, or its halves I and W
PASS = re.compile(r"PP:(?P<stage>\d+)(?P<way>[FBIW])(?P<number>\d+)")


class Pass(NamedTuple):
    """A micro-batch on a stage. way: F(orward), B(ackward), or a part of it: I(nput's gradient), W(eight's). stage: counted among those
    of this GPU, from 0. number: the micro-batch's."""

    start: float
    end: float
    stage: int
    number: int
    way: str


def passes(spans: Sequence[Span]) -> list[Pass]:
    """What one GPU did for a pipeline, in the order of time: a pass for each annotation, from its first span to its last."""
    times: dict[tuple[int, str, int], tuple[float, float]] = {}  # by stage, way and micro-batch
    for span in spans:
        action = PASS.fullmatch(span.annotation)
        if action and span.kind not in ("communication", "waiting"):
            key = int(action["stage"]), action["way"], int(action["number"])
            start, end = times.get(key, (span.start, span.end))
            times[key] = min(start, span.start), max(end, span.end)
    stages = sorted({stage for stage, *_ in times})
    return sorted(Pass(*when, stages.index(stage), number, way) for (stage, way, number), when in times.items())
