"""`--explain` on real GPUs: torch.profiler for a few steps of the program's optimizer, and its traces read."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from virtualgpu import environment
from virtualgpu.run import cli, results
from virtualgpu.run.explain.changes import mean, parts
from virtualgpu.run.explain.runs import NOT_ENDED, STEPS, Explanation, Row
from virtualgpu.run.trials import steps as steps_
from virtualgpu.run.trials.programs import Programs
from virtualgpu.run.trials.steps import StepCounter
from virtualgpu.timing.trace import Span

# -- A Chrome trace of torch.profiler from real GPUs, read as what `changes.parts` asks for: a pure function of the trace.
#
# Kernels and copies have their times from the trace, and from the call of the driver with the same correlation when they were launched. A
# step ends with our mark (MARK), or else with the optimizer's annotation. A kernel of NCCL is there while it waits for other ranks: of
# one collective the rank that comes last has the shortest kernel, and what the others have beyond that they waited (`meet`).

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


def read_trace(events: Sequence[dict]) -> Trace:
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
    """With the kind and the name that `changes.parts` knows. optimizer: from when to when the host was in its steps."""
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


# -- `--explain` on real GPUs: torch.profiler in each process of the program for a few steps of its optimizer, and their traces read.
#
# What a change would gain is not told of them: that takes the same program on virtual GPUs.


LEFT = "profile"
SKIPPED = 2  # steps before the profiler begins
ASK = "import torch; print('GPUs:', torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def gpus() -> int:
    """How many real ones PyTorch sees here. Asked of a process of its own, and only where a driver can be."""
    if not os.path.exists("/dev/nvidiactl") and shutil.which("nvidia-smi") is None:
        return 0
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    return int(asked.stdout.split("GPUs:")[-1]) if asked.returncode == 0 and "GPUs:" in asked.stdout else 0


def run(
    command: Sequence[str],
    most: int = STEPS,
    limit: float | None = None,
    show: Callable[[str], None] = lambda words: None,
) -> Explanation:
    """Where a step of this program goes on this machine's GPUs: the mean of the steps after the first two.

    most: how many it makes. limit: seconds after which it has failed. An interrupt ends it.
    """
    show("the program, profiled")
    with Programs() as programs, cli.folder() as path:
        environ = {
            **os.environ,
            environment.PROFILED: json.dumps({"folder": path, "steps": max(most or STEPS, SKIPPED + 1)}),
        }
        environ["PYTHONPATH"] = cli.first(cli.SITE, environ.get("PYTHONPATH"))
        environ.pop(environment.VARIABLE, None)
        status, output = programs.output_of(command, environ, path, limit)
        ranks = dict(results.collect(path, "rank"))
        traces = [(ranks.get(pid) or 0, trace["traceEvents"]) for pid, trace in results.collect(path, LEFT) if trace]
    if status is None:
        return Explanation(failed=NOT_ENDED)
    if status:
        return Explanation(failed=steps_.end(status, output))
    return explained(sorted(traces, key=lambda trace: trace[0]))


def explained(traces: Sequence[tuple[int, list[dict]]]) -> Explanation:
    """From (rank, the events of its trace): a row for each GPU of each rank."""
    traces_read = [(rank, read_trace(events)) for rank, events in traces]
    ended = [(rank, trace) for rank, trace in traces_read if len(trace.ends) >= 2]
    if not ended:
        return Explanation(
            failed="the program ended before the profiler had seen a step of an optimizer of torch.optim"
        )
    rows, taken = [], []
    met = meet([trace for _, trace in ended])
    for (rank, _), trace in zip(ended, met, strict=True):
        for gpu in sorted({span.gpu for span in trace.spans}):
            own = [span for span in trace.spans if span.gpu == gpu]
            steps = [parts(own, trace.loading, begin, end) for begin, end in itertools.pairwise(trace.ends)]
            rows.append(Row(rank, gpu, mean(steps)))
            taken.append([step.step for step in steps])
    if not rows:
        return Explanation(failed="the program used no GPU")
    slowest = [max(step) for step in zip(*taken, strict=False)]
    return Explanation(sum(slowest) / len(slowest), tuple(rows), has_loader=any(trace.loading for trace in met))


class Profile(StepCounter):
    """In a process of the program: profiles its steps after the first two, leaves the trace, and ends it as if it had come to its end."""

    def __init__(self, folder: str, most: int):
        super().__init__(most)
        self.folder = folder
        self.profiler: Any = None

    def on_step(self) -> None:
        """A step was made."""
        import torch

        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        if self.count == min(SKIPPED, self.most - 1):
            wait()
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler is not None:
            with torch.profiler.record_function(MARK):
                pass
        if self.count == self.most:
            wait()
            self.profiler.stop()
            results.leave(self.folder, "rank", environment.rank())
            self.profiler.export_chrome_trace(results.path(self.folder, LEFT))


_profile: Profile | None = None


def start() -> None:
    """In each process of the program, after `import torch`."""
    global _profile
    if _profile is None:
        settings = json.loads(os.environ[environment.PROFILED])
        _profile = Profile(settings["folder"], settings["steps"])
