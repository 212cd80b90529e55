"""What the GPUs did: as a list, as a Chrome trace (chrome://tracing and https://ui.perfetto.dev open it), and few enough to be drawn."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from virtualgpu.timing.queues import Span


class Recording(list):
    """Spans in the order in which they were queued."""

    def save(self, path: str | os.PathLike) -> None:
        """Write them as a Chrome trace (JSON): a process for each GPU, a thread for each of its streams."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": chrome_events(self), "displayTimeUnit": "ms"}, file)


def chrome_events(spans: Iterable[Span], origin: float = 0.0) -> list[dict]:
    """The events of a Chrome trace; times in microseconds since `origin` (seconds). Kernels of one annotation that follow each
    other on a stream lie under one event of that name, of the category that torch.profiler gives these."""
    spans = list(spans)
    events: list[dict] = []
    for gpu, stream in sorted({(span.gpu, span.stream) for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": gpu, "args": {"name": f"GPU {gpu} (virtual)"}})
        name = "default stream" if stream == 0 else f"stream {stream}"
        events.append({"ph": "M", "name": "thread_name", "pid": gpu, "tid": stream, "args": {"name": name}})
    for span in [*_annotated(spans), *spans]:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": span.gpu,
                "tid": span.stream,
                "ts": (span.start - origin) * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    return events


def _annotated(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    latest: dict[tuple[int, int], Span] = {}  # of each stream
    for span in sorted(spans, key=lambda span: span.start):
        key = span.gpu, span.stream
        open_span = latest.get(key)
        if open_span is not None and open_span.name == span.annotation:
            latest[key] = replace(open_span, end=max(open_span.end, span.end))
            continue
        if open_span is not None:
            merged.append(open_span)
        latest.pop(key, None)
        if span.annotation:
            latest[key] = replace(span, kind="gpu_user_annotation", name=span.annotation)
    return merged + list(latest.values())


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
