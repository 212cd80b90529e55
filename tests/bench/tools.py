"""What the benchmarks share: a line of the table, and how long something takes."""

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).parent.parent.parent / "build"


@dataclass
class Row:
    """met: whether the target is; True where there is none."""

    what: str
    figure: float
    unit: str = ""
    target: str = ""
    met: bool = True


def below(what: str, figure: float, unit: str, target: float) -> Row:
    return Row(what, figure, unit, f"< {target:g} {unit}", figure < target)


def silent():
    """gpus() says each time what it gives."""
    return contextlib.redirect_stdout(io.StringIO())


def timed(call, times: int = 1) -> float:
    """Seconds a call, after one to warm up."""
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def train(model, optimizer, loss, x, y) -> None:
    """One step."""
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()
