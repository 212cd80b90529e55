"""What `fit` prints: a row a trial, with prices per hour (a dated table, which the reader may replace)."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from virtualgpu.hardware.units import text_table
from virtualgpu.run.fit.search import Trial, largest
from virtualgpu.run.report import size
from virtualgpu.run.trials import not_known

# -- What a GPU costs per hour: a dated table, which the reader may replace.

TABLE = str(Path(__file__).parents[2] / "hardware" / "data" / "prices.csv")


class Price(NamedTuple):
    """US dollars per hour and GPU; who asked that, and when, as far as the table says it."""

    usd_per_hour: float
    provider: str = ""
    as_of: str = ""


def load(path: str | None = None) -> dict[str, Price]:
    """Of each card, from the file, or from TABLE. Raises ValueError where it has no columns card and usd_per_hour, or for the first row
    that says no price above 0, names a card again, or has more fields than there are columns."""
    path = TABLE if path is None else path
    prices: dict[str, Price] = {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a mark
            rows = csv.DictReader(file)
            if missing := {"card", "usd_per_hour"} - set(rows.fieldnames or ()):
                raise ValueError(f"there is no {' and no '.join(sorted(missing))}")
            for row in rows:
                if wrong := _wrong(row, prices):
                    raise ValueError(f"line {rows.line_num}: {wrong}")
                said_by = (row.get("provider") or "", row.get("as_of") or "")
                prices[row["card"].strip()] = Price(float(row["usd_per_hour"]), *said_by)
        if not prices:
            raise ValueError("there is no row below them")
    except (OSError, csv.Error, ValueError) as error:
        raise ValueError(f"{path}: a table of prices has the columns card and usd_per_hour ({error})") from None
    return prices


def _wrong(row: dict, prices: Mapping[str, Price]) -> str:
    """What is the matter with this row; empty where nothing is."""
    card, price = (row["card"] or "").strip(), row["usd_per_hour"]
    try:
        figure = float(price)
    except (TypeError, ValueError):
        figure = 0.0
    # "T4,0,35": the price is in two fields
    if None in row or (row.get("provider") or "").strip().isdigit():
        return f"{card} has a field too many: write a price's decimals behind a point, as in 0.35"
    if not card or not 0 < figure < math.inf:
        return f"{card or 'a card without a name'} at {price!r}: write a name, and dollars above 0, as in 0.35"
    return f"{card} has a price already: leave one row of each card" if price_of(card, prices) else ""


def price_of(card: str, prices: Mapping[str, Price]) -> Price | None:
    """That card's, whichever way its name is written: "A100", "a100". None where the table has none."""
    names = {name.casefold(): price for name, price in prices.items()}
    return names.get(card.strip().casefold())


def whose(cards: Iterable[str], prices: Mapping[str, Price]) -> str:
    """Whose prices they are, and of when."""
    words = []
    for card in dict.fromkeys(cards):
        price = price_of(card, prices)
        source = ", ".join(filter(None, price[1:])) if price else ""
        words.append(
            f"{card} {price.usd_per_hour:.2f}" + f" ({source})" * bool(source) if price else f"{card} no price"
        )
    return f"$ per GPU and hour: {'; '.join(words)}. --prices FILE takes yours."


# -- What `fit` prints: a row a trial, those marked that are the cheapest by more than the clock's error, and what is to be known beside it; or all of it as JSON.


STEPS, SAMPLES = 1000, 1_000_000  # of which a price is told
TIGHT = 0.1  # of the card: what a real program may take beyond what is counted
ERROR = 1.3  # most steps of one GPU are simulated within 30 %
BOUND = 0.7  # of a step: a GPU that works less waits for its host (tests/judges/card: there the figures are off by more than 30 %)


def dollars(trial: Trial, price: Price | None, number: float, world_size: int | None = None) -> float | None:
    """Of so many steps on all GPUs; None where the card has no price, or no step was timed."""
    if not trial.fits or not trial.step or price is None:
        return None
    return number * trial.step / 3600 * price.usd_per_hour * (world_size or trial.gpus)


def lines(
    trials: Sequence[Trial], prices: Mapping[str, Price], world_size: int | None = None, searched: str = ""
) -> list[str]:
    """The table, then what is to be known of it. searched: the option whose largest value was looked for."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    timed = [trial for trial in trials if trial.fits and trial.step]
    counted = all(trial.samples for trial in timed)
    costs = [
        dollars(
            trial,
            price_of(trial.card, prices),
            SAMPLES / trial.samples if counted and trial.samples else STEPS,
            world_size,
        )
        for trial in trials
    ]
    known = [(tight(trial), cost) for trial, cost in zip(trials, costs, strict=True) if cost is not None]
    cheapest = min(known, default=None)  # a tight one only where no other fits
    as_cheap = {both for both in known if cheapest and both[0] == cheapest[0] and both[1] <= ERROR * cheapest[1]}
    decided = cheapest is not None and len(as_cheap) < len(set(known))  # no price decides within the error of the clock
    unit = "$ / M samples" if counted else f"$ / {STEPS:,} steps"
    rows = [("card", "GPUs", *names, "", "peak reserved", "left", "step", "samples/s", "against 1 GPU", unit)]
    for trial, cost in zip(trials, costs, strict=True):
        step = trial.step if trial.fits else None
        rows.append(
            (
                trial.card,
                str(world_size or trial.gpus),
                *(trial.values.get(name, "") for name in names),
                "fits, tight" if tight(trial) else trial.status,
                size(trial.reserved) if trial.reserved else "",
                size(trial.capacity - trial.reserved) if trial.fits else "",
                f"{1e3 * step:,.1f} ms" if step else "",
                f"{trial.samples / step:,.1f}" if step and counted and trial.samples else "",
                "" if (share := efficiency(trial, trials)) is None else f"{100 * share:.0f} %",
                ""
                if cost is None
                else f"{cost:.3f}" + (" <" if decided and (tight(trial), cost) in as_cheap else "  "),
            )
        )
    keep = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    text = text_table([tuple(row[index] for index in keep) for row in rows])
    if cheapest is not None:
        if decided:
            text.append("<: the cheapest that fits, and what costs as much within the clock's error.")
        elif len(known) > 1:
            text.append("Their prices differ by less than the clock's error: choose by memory and time.")
        text.append("Times are simulated; steps of one GPU come mostly within 30 % of measured ones.")
        text.append(whose([trial.card for trial in timed], prices))
    return [*text, *(_largest(trials, searched) if searched else []), *_remarks(trials)]


def tight(trial: Trial) -> bool:
    """It fits, with less than TIGHT of the card left."""
    return trial.fits and trial.capacity - trial.reserved < TIGHT * trial.capacity


def efficiency(trial: Trial, trials: Sequence[Trial]) -> float | None:
    """Samples per second and GPU against one GPU of the same card and values; of steps, where samples are not known. None without such a trial."""
    if trial.gpus == 1 or not trial.fits or not trial.step:
        return None
    for one in trials:
        if (one.card, one.gpus, one.values) == (trial.card, 1, trial.values) and one.fits and one.step:
            if trial.samples and one.samples:
                return trial.samples / trial.step / (one.samples / one.step) / trial.gpus
            return one.step / trial.step * trial.used / trial.gpus
    return None


def _largest(trials: Sequence[Trial], name: str) -> list[str]:
    """Of each place the largest that fits; where it is tight, also the largest that was tried and is not."""
    roomy = largest([trial for trial in trials if not tight(trial)], name)
    words = []
    for place, best in largest(trials, name).items():
        room = f" ({roomy[place].values[name]} leaves a tenth)" if tight(best) and place in roomy else ""
        words.append(f"{_place(best, name)}: {name}={best.values[name]}{room}")
    return [f"Largest that fits: {', '.join(words)}."] if words else []


def _place(trial: Trial, without: str = "") -> str:
    values = [f"{name}={value}" for name, value in trial.values.items() if name != without]
    return " ".join([trial.card if trial.gpus == 1 else f"{trial.gpus} x {trial.card}", *values])


def _named(trials: Sequence[Trial], of: Sequence[Trial], most: int = 3) -> str:
    """Which they are, where they are not all."""
    if len(trials) == len(of):
        return ""
    more = f" and {len(trials) - most} more" * (len(trials) > most)
    return ", ".join(map(_place, trials[:most])) + f"{more}: "


def _remarks(trials: Sequence[Trial]) -> list[str]:
    """A sentence for each thing that the table does not say."""
    remarks: list[str] = []
    done = [trial for trial in trials if trial.fits]
    failed = [trial for trial in trials if trial.status == "failed"]
    for words in dict.fromkeys(trial.words for trial in failed):
        remarks.append(f"failed: {_named([t for t in failed if t.words == words], trials)}{words}")
    if barely := [trial for trial in done if tight(trial)]:
        remarks.append(
            f"tight: {_named(barely, [])}less than a tenth of the card is left, and a real program may need that."
        )
    if timeless := [trial for trial in done if trial.step is None]:
        what = "one optimizer step" if any(trial.ranks for trial in timeless) else "no optimizer step"
        remarks.append(f"{_named(timeless, trials)}{what} was seen before the program ended, so that none is timed.")
    if waiting := [trial for trial in done if trial.gpus == 1 and (trial.working or 1.0) < BOUND]:
        least, most = (f"{100 * of(trial.working or 0.0 for trial in waiting):.0f}" for of in (min, max))
        remarks.append(
            f"bound by the host: {_named(waiting, trials)}the GPU works {least if least == most else f'{least} to {most}'} % of a step and waits "
            "otherwise. One host takes twice as long as another for the same: such a time is less certain than the rest."
        )
    if idle := [trial for trial in done if trial.used < trial.gpus]:
        counts = ", ".join(dict.fromkeys(f"{t.gpus - t.used} of {t.gpus} GPUs" for t in idle))
        remarks.append(
            f"{counts} stayed idle: the program uses {_counts(t.used for t in idle)} (torchrun's --nproc-per-node={{gpus}}?)."
        )
    remarks += [
        f"{name} changed nothing: the same memory and time for {values}. Does the program heed it?"
        for name, values in _unheeded(done)
    ]
    remarks += dict.fromkeys(note for trial in trials for note in trial.notes)
    if reads := sorted({trial.reads for trial in trials if trial.reads}):
        remarks.append(not_known(reads))
    return remarks


def _counts(numbers) -> str:
    return " or ".join(str(number) for number in sorted(set(numbers)))


def _unheeded(done: Sequence[Trial]) -> list[tuple[str, str]]:
    """Options whose values all came to the same, in every place, and these values."""
    unheeded = []
    for name in dict.fromkeys(name for trial in done for name in trial.values):
        places: dict[tuple, dict[str, tuple]] = {}
        for trial in done:
            others = tuple((other, value) for other, value in trial.values.items() if other != name)
            places.setdefault((trial.card, trial.gpus, others), {})[trial.values[name]] = (trial.reserved, trial.step)
        several = [results for results in places.values() if len(results) > 1]
        if several and all(len(set(results.values())) == 1 for results in several):
            unheeded.append((name, ", ".join(several[0])))
    return unheeded


def as_json(trials: Sequence[Trial], prices: Mapping[str, Price], world_size: int | None = None) -> str:
    """A list of trials, bytes and seconds as they are, with what steps and samples cost, and of when the price is."""
    rows = []
    for trial in trials:
        price = price_of(trial.card, prices)
        of_samples = dollars(trial, price, SAMPLES / trial.samples, world_size) if trial.samples else None
        costs = {
            f"usd_per_{STEPS}_steps": dollars(trial, price, STEPS, world_size),
            "usd_per_million_samples": of_samples,
            "usd_per_hour": price and price.usd_per_hour,
            "price_as_of": price and price.as_of,
        }
        rows.append({**trial._asdict(), "tight": tight(trial), "efficiency": efficiency(trial, trials), **costs})
    return json.dumps(rows, indent=1)
