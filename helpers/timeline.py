"""What each GPU does when, while a `with` block runs: simulated for virtual GPUs, measured by torch.profiler for real ones.

    with Timeline() as timeline:
        ...                         # a step or two
    plots.timeline(timeline, ...)

Processes measure themselves with a Recorder, and the parent puts their rows together: Timeline.of_ranks([...]).
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

import virtualgpu


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work on one device, in seconds since the block began. kind: forward, backward, optimizer, copy, send, wait,
    or kernel where the profiler does not tell them apart; trial or cut in a search."""

    start: float
    end: float
    kind: str


class Timeline:
    """rows: {"cuda:0": [Span, ...], ...}, neighbours of one kind joined; seconds: how long the block took, its work included.

    Raises RuntimeError where there is no GPU, real or virtual.
    """

    @classmethod
    def of_ranks(cls, spans: Sequence[Sequence[Span]]) -> "Timeline":
        """One row a rank, from what each rank's Recorder holds. Their clock is the machine's, so that rows can be compared."""
        timeline, every = cls(), [span for row in spans for span in row]
        start = min((span.start for span in every), default=0.0)
        timeline.origin = "measured"
        timeline.seconds = max((span.end for span in every), default=start) - start
        timeline.rows = {
            f"rank {rank}": [Span(s.start - start, s.end - start, s.kind) for s in row]
            for rank, row in enumerate(spans)
        }
        return timeline

    @classmethod
    def of_workers(cls, trials: Sequence[tuple[int, float, float, bool]]) -> "Timeline":
        """One row a worker process, from (its number, start, end, whether it was cut) of each trial of a search."""
        timeline = cls.of_ranks(
            [
                [Span(start, end, "cut" if cut else "trial") for process, start, end, cut in trials if process == own]
                for own in sorted({process for process, *_ in trials})
            ]
        )
        timeline.rows = {name.replace("rank", "worker"): spans for name, spans in timeline.rows.items()}
        return timeline

    def __enter__(self) -> "Timeline":
        self.rows: dict[str, list[Span]] = {}
        self.seconds = 0.0
        self._machine = virtualgpu.machine()
        if self._machine is not None:
            self.origin = "simulated"
            self._machine.clock.wait()
            self._start = self._machine.clock.host
            self._recorder = virtualgpu.recording()
            self._spans = self._recorder.__enter__()
        elif torch.cuda.is_available():
            self.origin = "measured"
            torch.cuda.synchronize()
            self._recorder = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._recorder.__enter__()
        else:
            raise RuntimeError(
                "a timeline needs GPUs: call helpers.gpus(2) first, which makes virtual ones where there are none"
            )
        return self

    def __exit__(self, *error) -> None:
        if self.origin == "simulated":
            self._machine.clock.wait()
            self._recorder.__exit__(*error)
            self.seconds = self._machine.clock.host - self._start
            found = [
                (gpu.index, [Span(s.start, s.end, s.kind) for s in self._spans if s.gpu == gpu.index])
                for gpu in self._machine.gpus
            ]
            start = self._start
        else:
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
            self._recorder.__exit__(*error)
            found, start = self._measured()
        for index, spans in found:
            shifted = [Span(s.start - start, s.end - start, s.kind) for s in spans]
            self.rows[f"cuda:{index}"] = _joined(shifted, self.seconds / 2000)

    def _measured(self) -> tuple[list[tuple[int, list[Span]]], float]:
        events = self._recorder.profiler.kineto_results.events()
        on_gpu = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns()]
        by_gpu: dict[int, list[Span]] = {index: [] for index in range(torch.cuda.device_count())}
        for e in sorted(on_gpu, key=lambda e: e.start_ns()):
            kind = "copy" if e.name().startswith("Memcpy") else "kernel"
            by_gpu[e.device_index()].append(Span(e.start_ns() / 1e9, (e.start_ns() + e.duration_ns()) / 1e9, kind))
        times = [span for spans in by_gpu.values() for span in spans]
        start = min((span.start for span in times), default=0.0)
        self.seconds = max((span.end for span in times), default=0.0) - start
        return list(by_gpu.items()), start


class Recorder:
    """What this process does when. `with recorder("forward"): ...`, or a function that is recorded at each call."""

    def __init__(self):
        self.spans: list[Span] = []

    def __call__(self, kind: str) -> "_Recording":
        return _Recording(self.spans, kind)

    def wrap(self, kind: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def recorded(*args, **kwargs):
            with self(kind):
                return function(*args, **kwargs)

        return recorded


class _Recording:
    def __init__(self, spans: list[Span], kind: str):
        self.spans, self.kind = spans, kind

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error) -> None:
        self.spans.append(Span(self.start, time.perf_counter(), self.kind))


def _joined(spans: list[Span], gap: float) -> list[Span]:
    """Neighbours of one kind as one, where less than `gap` seconds lie between: thousands of kernels, dozens of bars."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].kind == span.kind and span.start - joined[-1].end <= gap:
            joined[-1] = Span(joined[-1].start, span.end, span.kind)
        else:
            joined.append(span)
    return joined
