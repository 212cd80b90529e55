"""What each GPU does when, in a `with` block: simulated for virtual GPUs, measured by torch.profiler for real ones.

    with Timeline() as timeline:
        ...                         # a step or two
    plots.timeline(timeline, ...)

Processes measure themselves with a Recorder, and the parent puts their rows together: Timeline.of_ranks([...]). A Span
is the engine's, of the kinds forward, backward, optimizer, copy; here also send, wait, kernel where the profiler does
not tell them apart, trial or cut in a search.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

import virtualgpu
from virtualgpu.simulation.clock import Span
from virtualgpu.simulation.timeline import recorded, row


class Timeline:
    """rows: {"cuda:0": [Span, ...], ...}, neighbours of one kind joined, in seconds since the block began.

    seconds: how long it took, its work included. Raises RuntimeError where there is no GPU, real or virtual.
    """

    def __init__(self, rows: dict[str, list[Span]] | None = None, seconds: float = 0.0, origin: str = "measured"):
        self.rows, self.seconds, self.origin = rows or {}, seconds, origin

    @classmethod
    def of_ranks(cls, spans: Sequence[Sequence[Span]], who: str = "rank", origin: str = "measured") -> "Timeline":
        """One row a rank, from what each rank's Recorder or recording() holds: one clock for all, so that rows compare."""
        every = [span for own in spans for span in own]
        start, end = min((span.start for span in every), default=0.0), max((span.end for span in every), default=0.0)
        moved = [[replace(span, start=span.start - start, end=span.end - start) for span in own] for own in spans]
        return cls({f"{who} {number}": own for number, own in enumerate(moved)}, end - start, origin)

    @classmethod
    def of_workers(cls, trials: Sequence[tuple[int, float, float, bool]]) -> "Timeline":
        """One row a worker process, from (its number, start, end, whether it was cut) of each trial of a search."""
        rows: dict[int, list[Span]] = {process: [] for process in sorted({process for process, *_ in trials})}
        for process, start, end, cut in trials:
            rows[process].append(Span(0, start, end, "cut" if cut else "trial", "trial"))
        return cls.of_ranks(list(rows.values()), "worker")

    def __enter__(self) -> "Timeline":
        virtual = virtualgpu.machine() is not None
        if not virtual and not torch.cuda.is_available():
            raise RuntimeError("a timeline needs GPUs, real or virtual: call helpers.gpus(2) first")
        self._block = self._simulated() if virtual else self._measured()
        self._block.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._block.__exit__(*error)

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        self.origin = "simulated"
        with recorded(virtualgpu.machine().clock) as block:
            yield
        self.rows, self.seconds = {f"cuda:{gpu}": own for gpu, own in enumerate(block.rows)}, block.seconds

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        self.origin = "measured"
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        spans: list[list[Span]] = [[] for _ in range(torch.cuda.device_count())]
        for event in profiler.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
                kind = "copy" if event.name().startswith("Memcpy") else "kernel"
                start, end = event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9
                spans[event.device_index()].append(Span(event.device_index(), start, end, kind, event.name()))
        start = min((span.start for own in spans for span in own), default=0.0)
        self.seconds = max((span.end for own in spans for span in own), default=0.0) - start
        self.rows = {f"cuda:{gpu}": row(own, start, self.seconds) for gpu, own in enumerate(spans)}


class Recorder:
    """What this process does when. `with recorder("forward"): ...`, or a function that is recorded at each call."""

    def __init__(self):
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(0, start, time.perf_counter(), kind, kind))

    def wrap(self, kind: str, function: Callable) -> Callable:
        return self(kind)(function)
