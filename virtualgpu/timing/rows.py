"""One GPU's spans, few enough to be drawn; and what they are of a pipeline's work."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from virtualgpu.timing.queues import Span


def row(spans: Sequence[Span], start: float, seconds: float) -> list[Span]:
    """One GPU's spans in the order of time, from `start` on. Neighbours of one kind and annotation become one, where less than a
    2000th of `seconds`, half a pixel of a wide figure, lies between: thousands of kernels, dozens of bars. What a pipeline's
    schedule leaves for later has a kind of its own, "weight gradient"."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        span = replace(span, start=span.start - start, end=span.end - start)
        if (action := PASS.fullmatch(span.annotation)) and action["way"] == "W" and span.kind == "backward":
            span = replace(span, kind="weight gradient")
        alike = joined and (joined[-1].kind, joined[-1].annotation) == (span.kind, span.annotation)
        if alike and span.start - joined[-1].end <= seconds / 2000:
            joined[-1] = replace(joined[-1], end=max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


# How torch.distributed.pipelining.schedules calls a micro-batch's work on a stage: F forward, B backward, or its halves I and W
PASS = re.compile(r"PP:(?P<stage>\d+)(?P<way>[FBIW])(?P<number>\d+)")


class Pass(NamedTuple):
    """A micro-batch on a stage, forward or backward. stage: counted among those of this GPU, from 0. number: the micro-batch's."""

    start: float
    end: float
    stage: int
    number: int


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
    return sorted(Pass(*when, stages.index(stage), number) for (stage, _, number), when in times.items())
