"""While `fit` runs: how many of its trials are done."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from virtualgpu.run.fit.search import Range, Trial
from virtualgpu.run.trials.steps import line


@contextlib.contextmanager
def of(
    like: Sequence[str], gpus: Sequence[int], vary: Mapping[str, Sequence[str] | Range]
) -> Iterator[Callable[[Trial], None]]:
    """What to call with each trial of such a search."""
    lists = [len(values) for values in vary.values() if not isinstance(values, Range)]
    total = len(like) * len(gpus) * math.prod(lists) if len(lists) == len(vary) else None
    count = 0

    def note(trial: Trial) -> None:
        nonlocal count
        count += 1
        values = "".join(f" {name}={value}" for name, value in trial.values.items())
        show(f"{count}{f' of {total}' * bool(total)} tried: {trial.gpus} x {trial.card}{values} {trial.status}")

    with line() as show:
        if total:
            show(f"0 of {total} tried")
        yield note
