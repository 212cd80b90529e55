"""What the GPUs did: how busy they were, and as a Chrome trace (chrome://tracing and https://ui.perfetto.dev open it), written and read."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace

from virtualgpu.memory.ledger import share
from virtualgpu.timing.clock import Clock
from virtualgpu.timing.streams import Span


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


def gpu_spans(events: Iterable[dict]) -> list[Span]:
    """What real GPUs did, of a Chrome trace by torch.profiler ("traceEvents"), in seconds: kernels, those of NCCL (communication) and copies.
    They were issued at the end of the driver's call with the same correlation."""
    events = [event for event in events if event.get("ph") == "X" and "ts" in event]
    issued = {
        event.get("args", {}).get("correlation", -1): (event["ts"] + event.get("dur", 0)) * 1e-6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    spans = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args, name, start = event.get("args", {}), event["name"], event["ts"] * 1e-6
            kind = "copy" if event["cat"] == "gpu_memcpy" else "communication" if "nccl" in name.lower() else "kernel"
            call = min(issued.get(args.get("correlation", -1), start), start)
            end, gpu, stream = (event["ts"] + event.get("dur", 0)) * 1e-6, args.get("device", 0), args.get("stream", 0)
            spans.append(Span(int(gpu), start, end, kind, name, int(stream), "", call))
    return spans


class Utilization:
    """How busy GPUs were since somebody last asked, what NVML and GPUtil call utilization, on the simulated clock: one who asks, again and again.

    NCCL's kernels count, as in nvidia-smi, also while they wait for other ranks; computing is what other kernels do. Work counts from when it is
    queued, also where the GPU comes to it later."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._before: dict[int, tuple[float, float, float]] = {}

    def load(self, gpu: int) -> float:
        """The share of simulated time in which this GPU was busy since the last call for it (at first: since time 0);
        0 to 1."""
        return self.read(gpu)[0]

    def read(self, gpu: int) -> tuple[float, float]:
        """The same, and the share in which it was computing: busy with other kernels than NCCL's."""
        computing, latest = self._clock.computing[gpu], self._clock.latest()
        now = self._clock.busy[gpu], computing, latest
        before = self._before.get(gpu, (0.0, 0.0, 0.0))
        self._before[gpu] = now
        return share((now[0], latest), (before[0], before[2])), share((computing, latest), before[1:])
