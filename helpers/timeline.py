"""What each GPU does when, in a `with` block: simulated for virtual GPUs, measured by torch.profiler for real ones.

    with Timeline() as timeline:
        ...                         # a step or two
    plots.timeline(timeline, ...)

Ranks of `launch` return what recording() gave them, and the parent puts their rows together: Timeline.of_ranks([...]). A
Span is the engine's, of the kinds forward, backward, optimizer, copy, waiting (for the last rank), communication; here also weight gradient, and
kernel where the profiler does not tell them apart.
"""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

import virtualgpu
from virtualgpu.simulation.clock import Span
from virtualgpu.simulation.timeline import recorded, row

NOT_COMPUTING = ("copy", "waiting", "communication")  # kinds of spans


class Timeline:
    """rows: {"cuda:0": [Span, ...], ...}, neighbours of one kind joined, in seconds since the block began.

    seconds: how long it took, its work included. Raises RuntimeError where there is no GPU, real or virtual.
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
        rows = {f"rank {number}": row(own, start, end - start) for number, own in enumerate(spans)}
        return cls(rows, end - start, origin)

    @classmethod
    def of_slots(cls, table: Sequence[Sequence[str | None]]) -> "Timeline":
        """One row a stage, from a table on paper: "F3" and "B3" are forward and backward of micro-batch 3, None is a slot
        without work. A slot is drawn as a millisecond."""
        kinds = {"F": "forward", "B": "backward"}
        rows = {
            f"stage {stage}": [
                Span(stage, at / 1e3, (at + 1) / 1e3, kinds[work[0]], work, annotation=f"PP:{stage}{work}")
                for at, work in enumerate(row)
                if work is not None
            ]
            for stage, row in enumerate(table)
        }
        return cls(rows, max(map(len, table), default=0) / 1e3, "data")

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
        for event in _trace(profiler):
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                kind, gpu = "kernel" if event["cat"] == "kernel" else "copy", event["args"]["device"]
                kind = "communication" if event["name"].startswith("nccl") else kind
                start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                spans[gpu].append(Span(gpu, start, end, kind, event["name"], event["args"]["stream"]))
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
