"""`virtualgpu.fit`, from Python or a notebook, and the command line of `python -m virtualgpu fit`."""

import contextlib
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from virtualgpu.run import launcher
from virtualgpu.run.fit import search, table
from virtualgpu.run.fit.search import Range, Trial
from virtualgpu.run.fit.table import Price, load
from virtualgpu.run.options import listed, split, whole_number
from virtualgpu.run.trials import ended_by_sigterm, line

# -- `virtualgpu.fit`: what `python -m virtualgpu fit` does, from Python or a notebook.


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
    vary: Mapping[str, Sequence | str | Range] | None = None,
    world_size: int | None = None,
    memory: str | None = None,
    steps: int = 4,
    samples: str | None = None,
    prices: str | os.PathLike | None = None,
    jobs: int | None = None,
    limit: float | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
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
    on_trial: called with each trial as it ends.

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
    price_table = load(None if prices is None else os.fspath(prices))
    with progress(names, counts, varied) as show:

        def ended(trial: Trial) -> None:
            on_trial(trial)
            show(trial)

        trials = search.run(words, names, counts, varied, world_size, memory, steps, jobs, samples, limit, ended)
    return Trials(trials, price_table, world_size, search.searched(varied))


@contextlib.contextmanager
def progress(
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


def varied_by(text: str) -> tuple[str, Sequence[str] | Range]:
    """An option of the program and its values, of "batch-size=8,16" or "batch-size=8..512". Raises ValueError for another form."""
    name, equals, texts = text.lstrip("-").partition("=")
    if not equals or not name or not texts:
        such = "such as batch-size=8,16,32 or batch-size=8..512"
        raise ValueError(f"--vary {text!r}: give an option of the program and its values, {such}")
    if between := re.fullmatch(r"(\d+)\.\.(\d+)", texts):
        return name, Range(int(between[1]), int(between[2]))
    return name, texts.split(",")


def _varied(name: str, values: Sequence | str | Range) -> tuple[str, Sequence[str] | Range]:
    if isinstance(values, Range):
        return name, values
    if isinstance(values, str):
        return varied_by(f"{name}={values}")
    if not values:
        raise ValueError(f"fit: no value of {name} to try")
    return name, [str(value) for value in values]


# -- The command line of `python -m virtualgpu fit`.


USAGE = """\
usage: python -m virtualgpu fit [options] SCRIPT [arguments]        (or -m MODULE, or a COMMAND such as torchrun)

Will it fit, before I rent? The unchanged program, dry, over cards, numbers of GPUs and values of its own options.

  --like CARDS      names with commas: T4,L4,A100 (T4)
  --gpus NUMBERS    how many, with commas: 1,2,4 (1). {gpus} in the program's arguments stands for the number:
                    fit --gpus 1,2,4 torchrun --standalone --nproc-per-node={gpus} train.py
  --world-size N    one rank of so many plays alone (FSDP2 and the like, on more GPUs than processes would have room)
  --vary NAME=V,V   values of the program's option --NAME; several times for several options. NAME=8..512 searches
                    for the largest that fits: 8, 16, 32, ..., then between
  --memory SIZE     of each GPU, such as 16GB; the card's own unless given
  --steps N         optimizer steps after which the program is ended (4); 0: it runs to its end
  --samples PRODUCT samples of all ranks in an optimizer's step, where "samples/s" should not go by the rows that go into
                    the model: '{batch-size}*{gpus}*4'
  --prices FILE     a table with the columns card and usd_per_hour (virtualgpu/hardware/data/prices.csv)
  --jobs N          programs at a time (one a core, as far as memory goes; one, where ranks may meet at a fixed port: on
                    several GPUs or by a launcher, unless torchrun is --standalone)
  --limit SECONDS   after which a program is ended, and has failed (one that makes no optimizer step may run on and on)
  --json            the trials as JSON

Options of fit stand before the program. A program that decides by a value of the GPU gets nan in a dry run, and is told so.

Exit status: 0 where something fits, 1 where nothing does, 2 where the program failed or the command line is wrong.
"""
OPTIONS = listed(USAGE)


def main(arguments: list[str]) -> int:
    """The exit status, as USAGE says it."""
    with ended_by_sigterm():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    done: list[Trial] = []  # for an interrupt
    try:
        given, command = split(arguments, OPTIONS, "fit --help")
        last = {name[2:]: values[-1] for name, values in given.items()}
        if "help" in last:
            print(USAGE, end="")
            return 0
        if not command:
            raise ValueError("name a program to try: a script, a command, or -m and a module (fit --help says more)")
        numbers = {
            name: whole_number(f"--{name}", last[name])
            for name in ("world-size", "steps", "jobs", "limit")
            if name in last
        }
        world_size, prices = numbers.get("world-size"), last.get("prices")
        trials = fit(
            command,
            like=_list(last, "like", "T4"),
            gpus=[int(number) for number in _list(last, "gpus", "1", r"[1-9]\d*")],
            vary=dict(varied_by(text) for text in given.get("--vary", [])),
            world_size=world_size,
            memory=last.get("memory"),
            steps=numbers.get("steps", 4),
            samples=last.get("samples"),
            prices=prices,
            jobs=numbers.get("jobs"),
            limit=numbers.get("limit"),
            on_trial=done.append,
        )
    except (ValueError, OSError) as error:
        print(f"python -m virtualgpu fit: {error}{launcher.cure(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if done and "json" not in last:
            print(Trials(done, load(prices), world_size, ""), flush=True)
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    print(trials.as_json() if "json" in last else trials)
    return 0 if any(trial.fits for trial in trials) else 2 if any(trial.status == "failed" for trial in trials) else 1


def _list(values: dict[str, str], name: str, default: str, form: str = r".+") -> list[str]:
    words = [word.strip() for word in values.get(name, default).split(",")]
    if wrong := [word for word in words if not re.fullmatch(form, word)]:
        raise ValueError(f"--{name} {wrong[0]!r}: give {'names' if form == '.+' else 'whole numbers'} with commas")
    return words
