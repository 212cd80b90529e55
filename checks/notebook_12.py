"""The graders of notebook 12: a search for the layout of a run, and the plan of a week in which nodes fail."""

import math
import random
from collections.abc import Callable
from typing import Any

from checks.grader import alone, grader, plain
from checks.notebook_04 import draw

TRIALS = 12  # that a search may make
NEAR = 1.15  # of the best known: what the simulated clock cannot tell apart
WEEK = 7 * 24 * 3600  # seconds
SURE = 0.95  # how likely the spare nodes last for the week
WEEKS, FAILURES = 4000, 20_000  # that are drawn to judge a plan


class OverBudget(Exception):
    """What a trial too many raises in the search."""


class Trials:
    """What a search gets as `try_layout`: seconds and GiB of a layout, from the table. The same again costs nothing."""

    def __init__(self, known: dict[tuple, tuple[float, float]]):
        self._known, self.made = known, set[tuple]()

    def __call__(self, layout: dict) -> tuple[float, float]:
        """Raises OverBudget after TRIALS different ones, ValueError for a layout that is none of the run's."""
        key = tuple(sorted(layout.items()))
        if key not in self._known:
            raise ValueError(f"{layout} is not among the layouts of this run")
        self.made.add(key)
        if len(self.made) > TRIALS:
            raise OverBudget(f"trial {TRIALS + 1} of {TRIALS}")
        return self._known[key]


@grader
def finds_layouts(find_layout: Callable[[dict, list[dict], Callable, float], dict]) -> str | None:
    """find_layout(run, layouts, try_layout, room) for each run of data/layouts.csv, its layouts in an order that is drawn: after at most
    TRIALS trials it returns one that fits in `room` GiB and takes at most NEAR times as long as the fastest that fits."""
    return alone(_searches, find_layout, draw())


def _searches(find_layout: Callable, seed: int) -> str | None:
    from notebooks.scripts import plan_llama

    draws = random.Random(seed)
    for name, run in plan_llama.RUNS.items():
        if complaint := searched(find_layout, run, plan_llama.table(name), plan_llama.room(run), draws):
            return f"{name}: {complaint}"
    return None


def searched(find_layout: Callable, run: dict, rows: list, room: float, draws: random.Random) -> str | None:
    """What is said of one search. rows: (layout, seconds, GiB) each."""
    layouts = [dict(layout) for layout, *_ in rows]
    draws.shuffle(layouts)
    known = {tuple(sorted(layout.items())): (seconds, gib) for layout, seconds, gib in rows}
    trials = Trials(known)
    try:
        found = find_layout(dict(run), layouts, trials, room)
    except OverBudget:
        return f"the search wants more than {TRIALS} trials of {len(rows)} layouts: which of them can you do without?"
    if len(trials.made) > TRIALS:
        return f"the search makes {len(trials.made)} trials, and has {TRIALS}"
    key = tuple(sorted(found.items())) if isinstance(found, dict) else None
    if key not in known:
        return f"the search returns {found!r}, which is not one of the layouts that it was given"
    seconds, gib = known[key]
    best = min(row[1] for row in rows if row[2] <= room)
    if gib > room:
        return f"{found} needs {gib:.1f} GiB, and there is room for {room:.1f}"
    if seconds > NEAR * best:
        return f"{found} takes {seconds:.2f} s a step; {best:.2f} s are possible, and at most {100 * NEAR - 100:.0f} % more pass"
    return None


@grader
def plans_a_week(plan_week: Callable[[int, float, float, float], tuple[float, int, float]]) -> str | None:
    """plan_week(nodes, between, save, restart) for a cluster and two that are drawn: (seconds of work between saves, spare nodes, share of the week that
    is useful work). `between`: seconds from failure to failure of one node; `save`, `restart`: seconds of one. Judged by weeks that are drawn."""
    return alone(_plans, plan_week, draw())


def _plans(plan_week: Callable, seed: int) -> str | None:
    draws = random.Random(seed)
    clusters = [(48, 2000, 60, 1500)]
    clusters += [
        (n, draws.randint(1000, 3000), draws.randint(20, 120), draws.randint(900, 1800))
        for n in draws.sample((24, 32, 64, 96, 128), 2)
    ]
    for nodes, hours, *costs in clusters:
        between, (save, restart) = 3600.0 * hours, map(float, costs)
        if complaint := planned(plan_week(nodes, between, save, restart), nodes, between, save, restart):
            where = f"{nodes} nodes, each of which fails once in {hours:,} hours, saves of {save:.0f} s, restarts of {restart:.0f} s"
            return f"{where}: {complaint}"
    return None


def planned(answer: Any, nodes: int, between: float, save: float, restart: float) -> str | None:
    """What is said of one plan; the same figures as plan_week's arguments."""
    try:
        interval, spares, share = map(plain, answer)
        interval, share = float(interval), float(share)
        whole = spares == int(spares) >= 0
    except (TypeError, ValueError):
        return f"{answer!r} is not (seconds between saves, spare nodes, useful share)"
    if not whole:
        return f"{spares} spare nodes: a whole number, please"
    if not 0 < interval <= WEEK:
        return f"saves every {interval:.3g} s: the interval is in seconds, above 0 and up to a week"
    rate = nodes / between
    best = math.sqrt(2 * save / rate)
    share_kept, most = (useful(at, rate, save, restart) for at in (interval, best))
    if most - share_kept > 0.12 * (1 - most):
        return f"saves every {interval:,.0f} s lose {1 - share_kept:.2%} of the week; {1 - most:.2%} are possible. How often does one of {nodes} nodes fail?"
    if not 0 <= share <= 1 or abs(share - share_kept) > 0.12 * (1 - share_kept):
        return f"you expect {share:.2%} useful work; in weeks that were drawn it is {share_kept:.2%}: saves, lost work and restarts, of all nodes' failures?"
    failures = _weeks(rate)
    lasts = sum(count <= spares for count in failures) / WEEKS
    if lasts < SURE - 0.015:
        return f"{int(spares)} spare nodes last in {lasts:.0%} of the weeks, and {SURE:.0%} are asked"
    if sum(count <= spares - 2 for count in failures) / WEEKS >= SURE + 0.01:
        return f"{int(spares)} spare nodes are more than {SURE:.0%} of the weeks need"
    return None


def _weeks(rate: float) -> list[int]:
    """How many failures each of WEEKS weeks has. rate: failures a second, of all nodes together."""
    draws, counts = random.Random(0), []
    for _ in range(WEEKS):
        count, now = 0, draws.expovariate(rate)
        while now < WEEK:
            count, now = count + 1, now + draws.expovariate(rate)
        counts.append(count)
    return counts


def useful(interval: float, rate: float, save: float, restart: float) -> float:
    """The share of drawn weeks that is work which is kept: work for `interval` seconds, then a save, again and again; a failure takes what
    was done since the last save, and a restart. (Failures during a restart start it anew.)"""
    draws, kept, spent = random.Random(1), 0.0, 0.0
    for _ in range(FAILURES):
        lived = draws.expovariate(rate)
        spent += lived
        kept += max(0.0, lived - restart) // (interval + save) * interval
    return kept / spent
