"""What the GPUs did, and that as a Chrome trace (chrome://tracing and https://ui.perfetto.dev open it). It takes no PyTorch."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Span:
    """Something a GPU did: `kind` is forward, backward, optimizer, copy, waiting (for others, in a collective) or communication; `name` the
    operation; `annotation` the innermost torch.profiler.record_function around its launch; `issued` when the host had launched it."""

    gpu: int
    start: float
    end: float
    kind: str
    name: str
    stream: int = 0
    annotation: str = ""
    issued: float = field(default=0.0, compare=False, repr=False)


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
