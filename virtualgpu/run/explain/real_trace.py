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

from virtualgpu.timing.trace import Span

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


class Trace(NamedTuple):
    """Of one rank. ends: when its steps ended. Times in seconds."""

    spans: list[Span]
    loading: list[tuple[float, float]]
    ends: list[float]


def read(events: Sequence[dict]) -> Trace:
    """The events of a trace ("traceEvents")."""
    optimizer, loading, marks = [], [], []
    for event in events:
        if event.get("ph") == "X" and "ts" in event and event.get("cat") in ("user_annotation", "cpu_op"):
            start, end, name = event["ts"] * 1e-6, (event["ts"] + event.get("dur", 0)) * 1e-6, event.get("name", "")
            if name.startswith(OPTIMIZER):
                optimizer.append((start, end))
            elif name.startswith(LOADER):
                loading.append((start, end))
            elif name == MARK:
                marks.append(end)
    optimizer.sort()
    spans = sorted((_classified(span, optimizer) for span in gpu_spans(events)), key=lambda span: span.start)
    hosts = sorted(marks or (end for _, end in optimizer))
    ends = [max([host, *(span.end for span in spans if span.issued <= host)]) for host in hosts]
    return Trace(spans, sorted(loading), ends)


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


def _classified(span: Span, optimizer: list[tuple[float, float]]) -> Span:
    """With the kind and the name that `parts` knows. optimizer: from when to when the host was in its steps."""
    if span.kind == "copy":
        between = "PtoP" in span.name or "Peer" in span.name
        return replace(span, kind="communication") if between else span
    if span.kind == "communication":
        return span
    name = next((operation for words, operation in KERNELS if words.search(span.name)), "elementwise")
    step = bisect_right(optimizer, (span.issued, float("inf"))) - 1
    in_step = step >= 0 and span.issued <= optimizer[step][1]
    return replace(span, kind="optimizer" if in_step else "forward", name=name)


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
