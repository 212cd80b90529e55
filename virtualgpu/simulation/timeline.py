"""What each GPU does while a block runs: its spans, few enough to be drawn."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from virtualgpu.simulation.clock import Clock, Span
from virtualgpu.simulation.trace import Recording


@dataclass
class Block:
    """rows: each GPU's spans; seconds: how long the block took, its work included. Both are filled when it ends."""

    rows: list[list[Span]] = field(default_factory=list)
    seconds: float = 0.0


@contextlib.contextmanager
def recorded(clock: Clock) -> Iterator[Block]:
    """The block begins when the work queued before it is done, and ends with its own."""
    block = Block()
    clock.wait()
    start, before = clock.host, clock.spans
    clock.spans = Recording()
    try:
        yield block
    finally:
        spans, clock.spans = clock.spans, before
        clock.wait()
        block.seconds = clock.host - start
        for gpu in range(len(clock.busy)):
            block.rows.append(row([span for span in spans if span.gpu == gpu], start, block.seconds))


def row(spans: Sequence[Span], start: float, seconds: float) -> list[Span]:
    """One GPU's spans in the order of time, from `start` on. Neighbours of one kind become one, where less than a
    2000th of `seconds`, half a pixel of a wide figure, lies between: thousands of kernels, dozens of bars."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        span = replace(span, start=span.start - start, end=span.end - start)
        if joined and joined[-1].kind == span.kind and span.start - joined[-1].end <= seconds / 2000:
            joined[-1] = replace(joined[-1], end=max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined
