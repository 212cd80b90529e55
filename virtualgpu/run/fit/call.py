"""`virtualgpu.fit`: what `python -m virtualgpu fit` does, from Python or a notebook."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from virtualgpu.run.fit import progress, search, table
from virtualgpu.run.fit.prices import Price, load
from virtualgpu.run.fit.search import Range, Trial


class Trials(list[Trial]):
    """The trials, each a `Trial`; shown, they are the table that the command prints."""

    def __init__(self, trials: Iterable[Trial], prices: Mapping[str, Price], world_size: int | None, searched: str):
        super().__init__(trials)
        self._prices, self._world_size, self._searched = prices, world_size, searched

    def __repr__(self) -> str:
        return "\n".join(table.lines(self, self._prices, self._world_size, self._searched))

    def as_json(self) -> str:
        """All that is known of each, bytes and seconds as they are."""
        return table.as_json(self, self._prices, self._world_size)

    @property
    def largest(self) -> list[Trial]:
        """Where a range was searched: of each card, number of GPUs and other values, the trial with the largest value that fits."""
        return list(search.largest(self, self._searched).values()) if self._searched else []


def fit(
    command: str | Sequence[str],
    like: str | Sequence[str] = "T4",
    gpus: int | Sequence[int] = 1,
    vary: Mapping[str, Sequence | str] | None = None,
    world_size: int | None = None,
    memory: str | None = None,
    steps: int = 4,
    samples: str | None = None,
    prices: str | os.PathLike | None = None,
    jobs: int | None = None,
    limit: float | None = None,
) -> Trials:
    """Runs a program, dry and as it stands, on each card and number of GPUs and with each value of its own options: what fits, how fast, at what price.

        trials = virtualgpu.fit("train.py --epochs 1", like=["T4", "L4"], vary={"batch-size": [32, 64]})
        trials                                   # the table
        trials[0].fits, trials[0].reserved       # True, and bytes of the fullest GPU
        virtualgpu.fit("train.py", vary={"batch-size": "8..512"}).largest       # a search for the largest that fits

    command: what would follow `python -m virtualgpu`, as one string or as words; {gpus} in it stands for the number of GPUs, and
    {name} for the value of what is varied. like: cards. vary: an option of the program, without its dashes, and the values to try, or
    "low..high" to search. world_size: one rank of so many plays alone. memory: of each GPU, such as "16GB". steps: of the program's
    optimizer, after which it is ended; 0: it runs to its end. samples: of all ranks in a step, a product such as
    "{batch-size}*{gpus}", where the rows that go into the model do not say it. prices: a file as hardware/data/prices.csv. jobs: programs at a
    time; one a core unless given, and one where ranks may meet at a fixed port. limit: seconds after which a program is ended, and has failed.

    Of a Trial, `reserved` and `capacity` are bytes, and `step` is in simulated seconds. Each is a process of its own, of which an interrupt leaves none.
    What does not fit or fails is a trial like others (`status`, `words`).

    Raises ValueError for a card, a number, a range, a product or a table of prices that is none.
    """
    words = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
    if not words:
        raise ValueError("fit: name a program to try")
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    if wrong := [count for count in counts if isinstance(count, bool) or not isinstance(count, int) or count < 1]:
        raise ValueError(f"fit: gpus={wrong[0]!r}: give whole numbers of GPUs, 1 at least")
    varied = dict(_varied(name.lstrip("-"), values) for name, values in (vary or {}).items())
    names = [name.strip() for name in like.split(",")] if isinstance(like, str) else list(like)
    path = None if prices is None else os.fspath(prices)
    given: dict[str, Any] = {"memory": memory, "step": steps, "jobs": jobs, "samples": samples, "limit": limit}
    return tried(words, names, counts, varied, world_size, path, **given)


def tried(
    command: Sequence[str],
    like: Sequence[str],
    gpus: Sequence[int],
    vary: Mapping[str, Sequence[str] | Range],
    world_size: int | None,
    prices: str | None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    **options: Any,
) -> Trials:
    """As `fit`, of what has been read. options: of `search.run`."""
    known = load(prices)
    with progress.of(like, gpus, vary) as note:

        def told(trial: Trial) -> None:
            on_trial(trial)
            note(trial)

        options |= {"like": like, "gpus": gpus, "vary": vary, "world_size": world_size, "on_trial": told}
        trials = search.run(command, **options)
    return Trials(trials, known, world_size, search.searched(vary))


def varied_by(text: str) -> tuple[str, Sequence[str] | Range]:
    """An option of the program and its values, of "batch-size=8,16" or "batch-size=8..512". Raises ValueError for another form."""
    name, equals, texts = text.lstrip("-").partition("=")
    if not equals or not name or not texts:
        such = "such as batch-size=8,16,32 or batch-size=8..512"
        raise ValueError(f"--vary {text!r}: give an option of the program and its values, {such}")
    if between := re.fullmatch(r"(\d+)\.\.(\d+)", texts):
        return name, Range(int(between[1]), int(between[2]))
    return name, texts.split(",")


def _varied(name: str, values: Sequence | str) -> tuple[str, Sequence[str] | Range]:
    if isinstance(values, str):
        return varied_by(f"{name}={values}")
    if not values:
        raise ValueError(f"fit: no value of {name} to try")
    return name, [str(value) for value in values]
