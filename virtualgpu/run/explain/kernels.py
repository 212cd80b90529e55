"""A Chrome trace of torch.profiler from real GPUs, read as what `parts` asks for: a pure function of the trace.

Kernels and copies have their times from the trace, and from the call of the driver with the same correlation when they were launched. A
step ends with our mark (MARK), or else with the optimizer's annotation. A kernel of NCCL is there while it waits for other ranks: of
one collective the rank that comes last has the shortest kernel, and what the others have beyond that they waited (`meet`).
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from virtualgpu.timing.queues import Span

MARK = "virtualgpu: a step has ended"
OPTIMIZER, LOADER = "Optimizer.step#", "enumerate(DataLoader)#"
# CUDA's kernels by their names, and an operation of the same kind for parts.kind_of; the first that fits
KERNELS = [
    (re.compile(words, re.IGNORECASE), operation)
    for words, operation in (
        (r"flash|fmha|attention", "attention"),
        (r"fprop|dgrad|wgrad|conv|winograd", "convolution"),
        (r"rnn|lstm|gru_", "rnn"),
        (r"softmax|nll_?loss|cross_?entropy", "softmax"),
        (r"(batch|layer|group|rms)_?norm|bn_[fb]w|GammaBeta", "batch_norm"),
        (r"embedding|index|gather|scatter|radixsort", "embedding"),
        (r"gemm|gemv|cutlass|cublas|nvjet|splitK", "mm"),
    )
]
COPIES = {"gpu_memcpy": "copy", "gpu_memset": "forward"}


class Trace(NamedTuple):
    """Of one rank. ends: when its steps ended. Times in seconds."""

    spans: list[Span]
    loading: list[tuple[float, float]]
    ends: list[float]


def read(events: Iterable[dict]) -> Trace:
    """The events of a trace ("traceEvents")."""
    whole = [event for event in events if event.get("ph") == "X" and "ts" in event]
    launched: dict[int, float] = {}
    optimizer, loading, marks, works = [], [], [], []
    for event in whole:
        kind, name = event.get("cat", ""), event.get("name", "")
        start, end = event["ts"] * 1e-6, (event["ts"] + event.get("dur", 0)) * 1e-6
        if kind in ("cuda_runtime", "cuda_driver"):
            launched[event.get("args", {}).get("correlation", -1)] = end
        elif kind == "kernel" or kind in COPIES:
            works.append((event, start, end))
        elif kind in ("user_annotation", "cpu_op") and name.startswith(OPTIMIZER):
            optimizer.append((start, end))
        elif kind in ("user_annotation", "cpu_op") and name.startswith(LOADER):
            loading.append((start, end))
        elif kind in ("user_annotation", "cpu_op") and name == MARK:
            marks.append(end)
    optimizer.sort()
    spans = [_span(event, start, end, launched, optimizer) for event, start, end in works]
    spans.sort(key=lambda span: span.start)
    hosts = sorted(marks or (end for _, end in optimizer))
    ends = [max([host, *(span.end for span in spans if span.issued <= host)]) for host in hosts]
    return Trace(spans, sorted(loading), ends)


def _span(
    event: dict, start: float, end: float, launched: dict[int, float], optimizer: list[tuple[float, float]]
) -> Span:
    args, name = event.get("args", {}), event["name"]
    issued = launched.get(args.get("correlation", -1), start)
    kind = COPIES.get(event["cat"], "forward")
    if kind != "copy":
        if "nccl" in name.lower():
            kind = "communication"
        else:
            at = bisect_right(optimizer, (issued, float("inf"))) - 1
            if at >= 0 and issued <= optimizer[at][1]:
                kind = "optimizer"
            name = next((operation for words, operation in KERNELS if words.search(name)), "elementwise")
    elif "PtoP" in name or "Peer" in name:
        kind = "communication"
    return Span(int(args.get("device", 0)), start, end, kind, name, int(args.get("stream", 0)), "", min(issued, start))


def meet(traces: Sequence[Trace]) -> list[Trace]:
    """The same of all ranks of a run, with their waiting for each other told from communication. Where the ranks have not called as many
    collectives, there is no telling."""
    own = [[span for span in trace.spans if span.kind == "communication"] for trace in traces]
    if len(traces) < 2 or len({len(spans) for spans in own}) != 1:
        return list(traces)
    shortest = [min(span.end - span.start for span in same) for same in zip(*own, strict=True)]
    met = []
    for trace in traces:
        lasts, spans = iter(shortest), []
        for span in trace.spans:
            if span.kind == "communication":
                begin = span.end - next(lasts)
                if begin > span.start:
                    spans.append(replace(span, end=begin, kind="waiting"))
                span = replace(span, start=max(begin, span.start))
            spans.append(span)
        met.append(trace._replace(spans=spans))
    return met
