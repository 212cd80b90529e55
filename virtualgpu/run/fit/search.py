"""A program, dry, over cards, numbers of GPUs and values of its own options: what fits, and how fast."""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.memory.ledger import entries
from virtualgpu.run import launcher, results, trials
from virtualgpu.run.trials import Programs, side_by_side

# -- The command of a trial: values put into it, and how many samples a step of it has.

PRODUCT = re.compile(r"\d+(\.\d+)?(\s*[*/]\s*\d+(\.\d+)?)*")
OF_EVALUATION = re.compile(r"eval|valid|val_|val-|test|predict")


def put(word: str, values: Mapping[str, str]) -> str:
    """The word with each {name} in it replaced by that one's value."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with these values: for {name}, for the option --name (or --na_me, or name=), or added as --name=value."""
    words = [put(word, values) for word in command]
    used = {"gpus", *(name for name in values if any("{" + name + "}" in word for word in command))}
    for name, value in values.items():
        if name in used:
            continue
        names = {name, name.replace("-", "_"), name.replace("_", "-")}
        for index, word in enumerate(words):
            option, equals, _ = word.partition("=")
            if equals and option in names | {f"--{name}" for name in names}:
                words[index] = f"{option}={value}"
            elif not equals and option.startswith("--") and option[2:] in names and index + 1 < len(words):
                words[index + 1] = value
            else:
                continue
            break
        else:
            words.append(f"--{name}={value}")
    return words


def batch(words: Sequence[str], values: Mapping[str, str]) -> int | None:
    """The batch size: of the one among `values`, or else among the command's options, that has "batch" in its name and a number for it.

    Options of evaluation do not count. None without one, or with several.
    """
    options = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.startswith("--") or equals:
            options[option] = value if equals else after
    for named in (values, options):
        numbers = [
            int(value)
            for name, value in named.items()
            if "batch" in name.lower() and value.isdigit() and not OF_EVALUATION.search(name)
        ]
        if numbers:
            return numbers[0] if len(numbers) == 1 else None
    return None


def product(formula: str) -> int:
    """Of "8*16*2". Raises ValueError where it is none."""
    if not PRODUCT.fullmatch(formula.strip()):
        raise ValueError(f"--samples: {formula!r} is no product of numbers, such as '{{batch-size}}*{{gpus}}*4'")
    number = Fraction(1)
    for sign, factor in re.findall(r"([*/]?)\s*([\d.]+)", formula):
        if sign == "/" and not Fraction(factor):
            raise ValueError(f"--samples: {formula!r} divides by 0")
        number = number / Fraction(factor) if sign == "/" else number * Fraction(factor)
    return round(number)


def rows(shapes: Iterable[tuple[Sequence[int], int]], passes: int, batch: int, ranks: int, gpus: int) -> int | None:
    """Samples of one rank's step, where the program's own batch size is `batch`; None where no shape has it.

    shapes: a rank's, each with its calls; passes: its backward passes. The batch stands first or second in them; as it is, divided among the ranks, or, in a program of
    one process, times the GPUs that it is spread over.
    """
    shapes = list(shapes)
    sizes = [(0, batch), (1, batch)]
    if ranks > 1:
        sizes += [(0, batch // ranks)] * (batch % ranks == 0)
    else:
        sizes += [(0, batch * gpus)]
    for place, size in sizes:
        if size and shapes and all(len(shape) > place and shape[place] == size for shape, _ in shapes):
            return size * max(1, min(passes, sum(calls for _, calls in shapes)))
    return None


# -- `python -m virtualgpu fit`: a program, dry, over cards, numbers of GPUs and values of its own options: what fits, and how fast.
#
# Each trial is the unchanged program in processes of its own, ended after a few steps of its optimizer (run/steps.py). `run` gives the
# trials as `Trial`s.


class Range(NamedTuple):
    """Values of an option to search for the largest that fits: low, 2 low, 4 low, ..., then between, in steps of low."""

    low: int
    high: int


class Trial(NamedTuple):
    """One configuration and what it came to.

    values: of the program's options. status: "fits", "out of memory" or "failed". reserved, capacity: bytes, of the fullest GPU.
    used: GPUs that it put something on. step: simulated seconds of an optimizer's step, the slowest rank's; None where there were none or
    one. ranks: processes that stepped. samples: of all ranks in such a step; None where no option of the program says a batch.
    working: the share of that step in which the rank's busiest GPU works.
    words: what failed, or how much more was asked for. reads: the first line of the program that reads a value of the GPU, which a dry
    run does not have ("train.py:12"): what it decides by that value, it decides by nan. notes: what the engine does otherwise than a GPU.
    """

    card: str
    gpus: int
    values: dict[str, str]
    status: str
    reserved: int = 0
    capacity: int = 0
    step: float | None = None
    ranks: int = 0
    words: str = ""
    reads: str = ""
    samples: int | None = None
    used: int = 0
    notes: tuple[str, ...] = ()
    working: float | None = None

    @property
    def fits(self) -> bool:
        """It ran to its last step on these GPUs."""
        return self.status == "fits"


def run(
    command: Sequence[str],
    like: Sequence[str] = ("T4",),
    gpus: Sequence[int] = (1,),
    vary: Mapping[str, Sequence[str] | Range] | None = None,
    world_size: int | None = None,
    memory: str | None = None,
    most: int = 4,
    jobs: int | None = None,
    samples: str | None = None,
    limit: float | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Every card with every number of GPUs and every combination of values; ranges are searched, and their trials are all given.

    command: what would follow `python -m virtualgpu`; {gpus} and {name} in it stand for the trial's own. A value goes to the option
    of that name, which is added where the command has none. most: how many optimizer steps a program makes. All else is as of `virtualgpu.fit`.

    Raises ValueError for a card that is not known, a range that is none or a product that is none. An interrupt ends all programs.
    """
    vary = dict(vary or {})
    ranges = {name: values for name, values in vary.items() if isinstance(values, Range)}
    lists = {name: values for name, values in vary.items() if not isinstance(values, Range)}
    if len(ranges) > 1:
        raise ValueError(
            f"one option can be searched at a time, not {' and '.join(ranges)}: give values for the others"
        )
    for name, (low, high) in ranges.items():
        if not 1 <= low <= high:
            raise ValueError(f"{name}={low}..{high}: the first number is to be 1 or more, and not above the second")
    if world_size is not None and list(gpus) != [1]:
        raise ValueError(f"with a world size of {world_size} one rank plays alone, on one GPU: give no number of GPUs")
    cards = {name: launcher.find_cards(1, name, memory) for name in like}  # a wrong name is said before anything runs
    with Programs() as programs:

        def trial(card: str, count: int, values: dict[str, str]) -> Trial:
            settings = environment.Settings(cards[card] * count, dry=True, steps=most)
            if world_size is not None:
                settings = settings._replace(cards=cards[card], single_rank=(world_size, 0, 8))
            held = {"gpus": str(count), **values}
            words = filled(command, held)
            result = _trial(programs, settings, words, Trial(card, count, values, "fits"), limit)
            if samples is not None:
                result = result._replace(samples=product(put(samples, held)))
            on_trial(result)
            return result

        def search(card: str, count: int, values: dict[str, str]) -> list[Trial]:
            if not ranges:
                return [trial(card, count, values)]
            ((name, (low, high)),) = ranges.items()
            tried = _search(low, high, lambda value: trial(card, count, {**values, name: str(value)}))
            return sorted(tried, key=lambda result: int(result.values[name]))

        combinations = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
        combined = list(itertools.product(like, gpus, combinations))
        if samples is not None:  # what is wrong with it is said before anything runs, too
            lows = {name: str(low) for name, (low, _) in ranges.items()}
            for count, combination in itertools.product(gpus, combinations):
                product(put(samples, {"gpus": str(count), **combination, **lows}))
        groups = programs.side_by_side(lambda place: search(*place), combined, jobs or side_by_side(command, gpus))
    return [result for group in groups for result in group]


def searched(vary: Mapping[str, Sequence[str] | Range]) -> str:
    """The option whose largest value is looked for; "" where there is none."""
    return next((name for name, values in vary.items() if isinstance(values, Range)), "")


def _search(low: int, high: int, trial: Callable[[int], Trial]) -> Iterator[Trial]:
    """Doubling from low while it fits, then halving what is between, in steps of low."""
    fits, fails, value = 0, None, low
    while value <= high and fails is None:
        result = trial(value)
        yield result
        if result.status == "failed":
            return
        fits, fails = (value, None) if result.fits else (fits, value)
        value = 2 * value if 2 * value <= high or value == high else high
        if fits == high:
            return
    while fails is not None and fits and fails - fits > low:
        value = fits + max(low, (fails - fits) // 2 // low * low)
        result = trial(value)
        yield result
        fits, fails = (value, fails) if result.fits else (fits, value)


def _trial(
    programs: Programs, settings: environment.Settings, command: list[str], trial: Trial, limit: float | None
) -> Trial:
    with launcher.folder() as path:
        settings = settings._replace(folder=path)
        status, output = programs.output_of(command, launcher.environment_of(settings, os.environ), path, limit)
        processes, used = trials.collect(path), entries(path)
        lost = "" if processes and used else results.lost(path, status, output)
    peaks = [max(usages) for usages in zip(*([u.peak_reserved for u in e.gpus] for e in used), strict=True)]
    stepped = [rank for rank in processes if rank.ends]
    timed = [rank for rank in processes if rank.seconds is not None]
    slowest = max(timed, key=lambda rank: rank.seconds or 0.0, default=None)
    trial = trial._replace(
        capacity=settings.cards[0].memory,
        reserved=max(peaks, default=0),
        used=sum(map(bool, peaks)),
        step=slowest and slowest.seconds,
        working=slowest and slowest.working,
        ranks=len(stepped),
        samples=_samples(stepped, batch(command, trial.values), settings),
        reads=trials.reads(output),
        notes=tuple(trials.warnings(output)),
    )
    if lost:
        return trial._replace(status="failed", words=lost)
    if status == 0 and not trial.used:
        last = trials.last_line(output)
        return trial._replace(
            status="failed", words="the program used no GPU" + (f", and said at its end: {last}" if last else "")
        )
    if status == 0:
        return trial
    trial = trial._replace(step=None, samples=None)
    if status is None:
        return trial._replace(status="failed", words=f"it had not ended after {limit:g} s: does it step an optimizer?")
    if lacking := trials.lacking(processes, output):
        return trial._replace(status="out of memory", words=lacking)
    return trial._replace(status="failed", words=trials.end(status, output))


def _samples(stepped: Sequence[trials.Steps], batch: int | None, settings: environment.Settings) -> int | None:
    """Of all ranks in a step: as many as went into the model, where a size of it is the batch; else the batch for each rank."""
    if batch is None or not stepped:
        return None
    ranks, gpus = (settings.single_rank[0], 1) if settings.single_rank else (len(stepped), len(settings.cards))
    counted = [rows(rank.rows, rank.passes, batch, ranks, gpus) or batch for rank in stepped]
    return counted[0] * ranks if settings.single_rank else sum(counted)


def largest(trials: Iterable[Trial], name: str) -> dict[tuple, Trial]:
    """Of each card, number of GPUs and other values: the trial that fits with the largest value of the option `name`."""
    best: dict[tuple, Trial] = {}
    for trial in trials:
        key = (trial.card, trial.gpus, *(value for other, value in trial.values.items() if other != name))
        if trial.fits and (key not in best or int(trial.values[name]) > int(best[key].values[name])):
            best[key] = trial
    return best
