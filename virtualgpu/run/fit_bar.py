"""While `fit` and `--explain` run: how far they are. A line on a terminal, or in a notebook's cell; gone at the end."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from virtualgpu.run.fit import Range, Trial


@contextlib.contextmanager
def of(
    like: Sequence[str], gpus: Sequence[int], vary: Mapping[str, Sequence[str] | Range]
) -> Iterator[Callable[[Trial], None]]:
    """What to call with each trial of such a search. Nothing is shown where TQDM_DISABLE is set, or nobody looks on."""
    lists = [len(values) for values in vary.values() if not isinstance(values, Range)]
    total = len(like) * len(gpus) * math.prod(lists) if len(lists) == len(vary) else None
    count = 0

    def told(trial: Trial) -> None:
        nonlocal count
        count += 1
        values = "".join(f" {name}={value}" for name, value in trial.values.items())
        show(f"{count}{f' of {total}' * bool(total)} tried: {trial.gpus} x {trial.card}{values} {trial.status}")

    with line() as show:
        if total:
            show(f"0 of {total} tried")
        yield told


@contextlib.contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """What to call with the words that stand there now."""
    if os.environ.get("TQDM_DISABLE"):
        yield lambda words: None
    elif sys.stderr is not None and sys.stderr.isatty():

        def show(words: str) -> None:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

        try:
            yield show
        finally:
            show("")
    elif (shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) and hasattr(shell, "kernel"):
        from IPython.display import display

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        try:
            yield lambda words: shown.update({"text/plain": words}, raw=True)
        finally:
            shown.update({"text/plain": ""}, raw=True)
    else:
        yield lambda words: None
