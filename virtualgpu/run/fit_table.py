"""What `fit` prints: a row a trial, the cheapest marked; or all of it as JSON."""

import csv
import json
import os
from collections.abc import Sequence

from virtualgpu.run import table
from virtualgpu.run.fit import Trial

PRICES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hardware", "data", "prices.csv")
STEPS, SAMPLES = 1000, 1_000_000  # of which a price is told


def prices(path: str = PRICES) -> dict[str, float]:
    """US dollars per hour and GPU, by card. Raises ValueError where the file has no columns card and usd_per_hour."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return {row["card"]: float(row["usd_per_hour"]) for row in csv.DictReader(file)}
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: a table of prices has the columns card and usd_per_hour ({error})") from None


def samples(trial: Trial, world_size: int | None = None) -> int | None:
    """In a step of all ranks: the value of the one option with "batch" in its name, which counts for each rank. None without one."""
    values = [value for name, value in trial.values.items() if "batch" in name and value.isdigit()]
    return int(values[0]) * (world_size or max(1, trial.ranks)) if len(values) == 1 else None


def dollars(trial: Trial, per_hour: dict[str, float], world_size: int | None = None) -> float | None:
    """Of SAMPLES samples, or of STEPS steps where `samples` knows none, on all GPUs; None where the card has no price, or no step was timed."""
    if not trial.fits or trial.step is None or trial.card not in per_hour:
        return None
    number = samples(trial, world_size)
    steps = STEPS if number is None else SAMPLES / number
    return steps * trial.step / 3600 * per_hour[trial.card] * (world_size or trial.gpus)


def lines(trials: Sequence[Trial], per_hour: dict[str, float], world_size: int | None = None) -> list[str]:
    """The table, then what failed."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    costs = [dollars(trial, per_hour, world_size) for trial in trials]
    unit = "$ per million samples" if all(samples(trial) for trial in trials) else f"$ per {STEPS:,} steps"
    cheapest = min((cost for cost in costs if cost is not None), default=None)
    alone = {(t.card, *sorted(t.values.items())): t.step for t in trials if t.gpus == 1 and t.fits and t.step}
    rows = [
        (
            "card",
            "GPUs",
            *names,
            "",
            "peak reserved",
            "left",
            "step",
            "steps/s",
            "samples/s",
            "against 1 GPU",
            unit,
        )
    ]
    for trial, cost in zip(trials, costs, strict=True):
        one = alone.get((trial.card, *sorted(trial.values.items())))
        fits = trial.fits
        rows.append(
            (
                trial.card,
                str(world_size or trial.gpus),
                *(trial.values.get(name, "") for name in names),
                trial.status,
                table.size(trial.reserved) if trial.reserved else "",
                table.size(trial.capacity - trial.reserved) if fits else "",
                f"{1e3 * trial.step:,.1f} ms" if fits and trial.step else "",
                f"{1 / trial.step:,.3g}" if fits and trial.step else "",
                f"{samples(trial, world_size) / trial.step:,.1f}" if fits and trial.step and samples(trial) else "",
                f"{100 * one / trial.step:.0f} %" if fits and one and trial.step and trial.gpus > 1 else "",
                "" if cost is None else f"{cost:.3f}" + (" <" if cost == cheapest and len(trials) > 1 else "  "),
            )
        )
    keep = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    told = table.columns([tuple(row[at] for at in keep) for row in rows])
    if cheapest is not None and len(trials) > 1:
        told.append(
            "<: the cheapest that fits. Times are simulated; steps of one GPU come mostly within 30 % of measured ones."
        )
    words = dict.fromkeys(f"{trial.status}: {trial.words}" for trial in trials if trial.status == "failed")
    reads = sorted({trial.reads for trial in trials if trial.reads})
    unsure = [
        f"{', '.join(reads)} reads a value of the GPU: a dry run has nan there, so what the program decides by it may be otherwise."
    ]
    return [*told, *words, *unsure[: len(reads)]]


def as_json(trials: Sequence[Trial], per_hour: dict[str, float], world_size: int | None = None) -> str:
    """A list of trials, bytes and seconds as they are, with samples in a step and what they, or steps, cost."""
    rows = [
        {**trial._asdict(), "samples": samples(trial, world_size), "usd": dollars(trial, per_hour, world_size)}
        for trial in trials
    ]
    return json.dumps(rows, indent=1)
