"""`python -m virtualgpu fit`: a program, dry, over cards, numbers of GPUs and values of its own options: what fits, and how fast.

Each trial is the unchanged program in processes of its own, ended after a few steps of its optimizer (run/steps.py). `run` gives the
trials as `Trial`s; fit_cli reads the command line, fit_table prints them.
"""

import contextlib
import itertools
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.memory.ledger import entries
from virtualgpu.run import cards, program, steps
from virtualgpu.run.family import kill_family
from virtualgpu.run.table import size

ROOM = 2 << 30  # bytes of this machine's memory that a trial may take: PyTorch, and a model's shapes
TAIL = 4000  # bytes of what a program printed, in which its error is looked for
UNKNOWN = re.compile(r"^(.+):(\d+): UserWarning: a dry run computes shapes", re.M)  # engine/dry.py


class Range(NamedTuple):
    """Values of an option to search for the largest that fits: low, 2 low, 4 low, ..., then between, in steps of low."""

    low: int
    high: int


class Trial(NamedTuple):
    """One configuration and what it came to.

    values: of the program's options. status: "fits", "out of memory" or "failed". reserved, capacity: bytes, of the fullest GPU.
    step: simulated seconds of an optimizer's step, the slowest rank's; None where there were none or one. ranks: processes that stepped.
    words: what failed, or how much more was asked for. reads: the first line of the program that reads a value of the GPU, which a dry
    run does not have ("train.py:12"): what it decides by that value, it decides by nan.
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
    step: int = 4,
    jobs: int | None = None,
    told: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Every card with every number of GPUs and every combination of values; ranges are searched, and their trials are all given.

    command: what would follow `python -m virtualgpu`; {gpus} and {name} in it stand for the trial's own. A value goes to the option
    of that name, which is added where the command has none. step: how many optimizer steps a program makes; 0: it runs to its end.
    world_size: one rank of so many plays alone on one GPU. told: called with each trial as it ends.

    Raises ValueError for a card that is not known or a range that is none. An interrupt ends all programs.
    """
    vary = dict(vary or {})
    ranges = {name: values for name, values in vary.items() if isinstance(values, Range)}
    lists = {name: values for name, values in vary.items() if name not in ranges}
    if len(ranges) > 1:
        raise ValueError(
            f"one option can be searched at a time, not {' and '.join(ranges)}: give values for the others"
        )
    for name, (low, high) in ranges.items():
        if not 1 <= low <= high:
            raise ValueError(f"{name}={low}..{high}: the first number is to be 1 or more, and not above the second")
    found = {name: cards.find(1, name, memory) for name in like}  # a wrong name is said before anything runs
    with _Programs() as programs:

        def trial(card: str, count: int, values: dict[str, str]) -> Trial:
            settings = environment.Settings(found[card] * count, dry=True, steps=step)
            if world_size is not None:
                settings = settings._replace(cards=found[card], alone=(world_size, 0, 8))
            result = _trial(programs, settings, filled(command, {"gpus": str(count), **values}), card, count, values)
            told(result)
            return result

        def search(card: str, count: int, values: dict[str, str]) -> list[Trial]:
            if not ranges:
                return [trial(card, count, values)]
            ((name, (low, high)),) = ranges.items()
            return list(_search(low, high, lambda value: trial(card, count, {**values, name: str(value)})))

        places = [
            (card, count, dict(zip(lists, values, strict=True)))
            for card, count, *values in itertools.product(like, gpus, *lists.values())
        ]
        with ThreadPoolExecutor(jobs or side_by_side()) as pool:
            try:
                groups = list(pool.map(lambda place: search(*place), places))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                programs.end()
                raise
    return [result for group in groups for result in group]


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


def side_by_side() -> int:
    """How many trials at a time: one a core, as far as this machine's memory goes."""
    free = None
    with contextlib.suppress(OSError, ValueError, AttributeError), open("/proc/meminfo", encoding="ascii") as file:
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", file.read())[1])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, (free or ROOM) // ROOM))


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with these values: for {name}, for the option --name (or --na_me), or added as one."""
    words, used = [], {"gpus"}
    for word in command:
        for name, value in values.items():
            if "{" + name + "}" in word:
                word, used = word.replace("{" + name + "}", value), used | {name}
        words.append(word)
    for name, value in values.items():
        if name in used:
            continue
        options = {f"--{name}", f"--{name.replace('-', '_')}", f"--{name.replace('_', '-')}"}
        for at, word in enumerate(words):
            option, equals, _ = word.partition("=")
            if option in options and (equals or at + 1 < len(words)):
                words[at : at + (1 if equals else 2)] = [f"{option}={value}"] if equals else [option, value]
                break
        else:
            words += [f"--{name}", value]
    return words


def _trial(
    programs: "_Programs", settings: environment.Settings, command: list[str], card: str, count: int, values
) -> Trial:
    with program.folder() as path:
        settings = settings._replace(folder=path)
        environ = {**program.defaults(os.environ), **os.environ, **program.variables(settings, os.environ)}
        output = os.path.join(path, "output")
        with open(output, "wb") as file:
            status = programs.run(program.command(command, environ["PATH"]), environ, file)
        left, used = steps.collect(path), entries(path)
        with open(output, encoding="utf-8", errors="replace") as file:
            said = file.read()
    reads = UNKNOWN.search(said)
    said = said[-TAIL:]
    result = Trial(
        card, count, values, "fits", capacity=settings.cards[0].memory, ranks=sum(bool(rank.ends) for rank in left)
    )
    peaks = [usage.peak_reserved for entry in used for usage in entry.gpus]
    result = result._replace(
        reads=f"{os.path.basename(reads[1])}:{reads[2]}" if reads else "",
        reserved=max(peaks, default=0),
        step=max((rank.seconds for rank in left if rank.seconds is not None), default=None),
    )
    if status == 0:
        return result if any(peaks) else result._replace(status="failed", words="the program used no GPU")
    asked = [rank.asked for rank in left if rank.asked is not None]
    if asked and "OutOfMemoryError" in said:
        return result._replace(status="out of memory", words=f"{size(max(asked))} more were asked for", step=None)
    return result._replace(status="failed", words=_error(said) or f"ended with status {status}")


def _error(said: str) -> str:
    """The last error of what a program printed, with the line of the program that it names last."""
    lines = said.strip().splitlines()
    errors = [
        line.strip() for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b", line.strip())
    ]
    places = re.findall(r'File "([^"]+)", line (\d+)', said)
    own = [place for place in places if "site-packages" not in place[0] and "virtualgpu" not in place[0]]
    where = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""
    words = errors[-1] if errors else lines[-1] if lines else ""
    return words[:300] + where if words else ""


class _Programs:
    """Those that run now; at the block's end, and at an interrupt, none of them is left."""

    def __init__(self):
        self._lock, self._running, self._ended = threading.Lock(), set(), False

    def __enter__(self) -> "_Programs":
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def run(self, command: list[str], environ: dict[str, str], output) -> int:
        with self._lock:
            if self._ended:
                raise InterruptedError("the search was ended")
            child = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(child)
        try:
            return child.wait()
        finally:
            with self._lock:
                self._running.discard(child)
            kill_family(child.pid)  # what it left behind

    def end(self) -> None:
        with self._lock:
            self._ended, running = True, list(self._running)
        for child in running:
            kill_family(child.pid)
            child.kill()


def largest(trials: Iterable[Trial], name: str) -> dict[tuple, Trial]:
    """Of each card, number of GPUs and other values: the trial that fits with the largest value of the option `name`."""
    best: dict[tuple, Trial] = {}
    for trial in trials:
        key = (trial.card, trial.gpus, *(value for other, value in trial.values.items() if other != name))
        if trial.fits and (key not in best or int(trial.values[name]) > int(best[key].values[name])):
            best[key] = trial
    return best
