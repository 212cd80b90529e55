"""The graders of notebook 12: a search for the layout of a run, and the plan of a week in which nodes fail; and the table behind the search."""

import random

import pytest

from checks.notebook_12 import TRIALS, planned, searched
from notebooks.scripts import plan_llama
from tests.notebooks.answers import solution
from virtualgpu import _compat

TABLES = {name: plan_llama.table(name) for name in plan_llama.RUNS}


def score(try_layout, layout, room):
    seconds, gib = try_layout(layout)
    return max(gib - room, 0), seconds


def within(**wanted):
    """The best of the first layouts with these values."""

    def search(run, layouts, try_layout, room):
        few = [layout for layout in layouts if wanted.items() <= layout.items()][:TRIALS]
        return min(few, key=lambda layout: score(try_layout, layout, room))

    return search


def swallowed(run, layouts, try_layout, room):
    best = layouts[0]
    for layout in layouts:
        try:
            best = min(best, layout, key=lambda one: score(try_layout, one, room))
        except Exception:  # the budget's
            break
    return best


def fastest_of_all(run, layouts, try_layout, room):
    """Without a look at the bytes."""
    few = [layout for layout in layouts if layout["checkpointing"] == "none" and layout["tp"] == 1][:TRIALS]
    return min(few, key=lambda layout: try_layout(layout)[0])


def complaints(find_layout, seeds=range(1)):
    """Of all runs, each with its layouts in these orders."""
    for name, rows in TABLES.items():
        run = plan_llama.RUNS[name]
        for seed in seeds:
            yield searched(find_layout, run, rows, plan_llama.room(run), random.Random(seed))


@pytest.mark.parametrize("find_layout, words", [
    (lambda run, layouts, try_layout, room: min(layouts, key=lambda layout: score(try_layout, layout, room)), f"more than {TRIALS} trials"),
    (swallowed, f"makes {TRIALS + 1} trials"),
    (fastest_of_all, "there is room for"),
    (within(tp=8), "are possible"),
    (lambda run, layouts, try_layout, room: None, "which is not one of the layouts"),
])  # fmt: skip
def test_a_search_that_is_not_right(find_layout, words):
    said = [complaint for complaint in complaints(find_layout) if complaint]
    assert any(words in complaint for complaint in said), said
    assert all("\n" not in complaint for complaint in said)


def climb(run, layouts, try_layout, room):
    """Random places, then uphill from the best."""
    nodes = max(layout["replicas"] for layout in layouts)
    first = [x for x in layouts if x["tp"] <= 2 and x["replicas"] in (1, nodes) and x["checkpointing"] != "full"][:6]
    tried = {tuple(x.values()): (score(try_layout, x, room), x) for x in first}
    while len(tried) < TRIALS:
        order = [x for _, x in sorted(tried.values(), key=lambda found: found[0])]
        near = (
            y for x in order for y in layouts if tuple(y.values()) not in tried and sum(x[k] != y[k] for k in x) == 1
        )
        layout = next(near)
        tried[tuple(layout.values())] = score(try_layout, layout, room), layout
    return min(tried.values(), key=lambda found: found[0])[1]


def test_a_search_that_is_right_in_another_way():
    assert [*complaints(climb)] == [None] * len(TABLES)


def test_the_solution_searches_well_from_every_order():
    assert not any(complaints(*solution("12", "find_layout"), seeds=range(30)))


@pytest.mark.parametrize("name", [*plan_llama.RUNS][::2])
def test_a_row_of_the_table_comes_out_again(name):
    run = plan_llama.RUNS[name]
    quick = [row for row in TABLES[name] if row[0]["tp"] == 1]
    layout, seconds, gib = random.Random(name).choice(quick)
    assert plan_llama.trial(run, layout) == pytest.approx(
        (seconds, gib), rel=1e-2 if _compat.KEEPS_WORKSPACES else 2e-3
    )
    assert [row[0] for row in TABLES[name]] == [*plan_llama.layouts(run)]


CLUSTER = dict(nodes=64, between=2000 * 3600.0, save=60.0, restart=1500.0)
RETURNED = "return interval, spares, share"


def returning(text: str) -> tuple[str, str]:
    return RETURNED, f"return {text}"


@pytest.mark.parametrize("changes, words", [
    (("2 * save / rate", "2 * save * between"), "How often does one of 64 nodes fail"),
    (("(interval / 2 + restart)", "interval / 2"), "lost work and restarts"),
    (returning("interval, round(mean), share"), "95% are asked"),
    (returning("interval, 2 * spares, share"), "more than 95% of the weeks need"),
    (returning("interval, spares - 0.5, share"), "a whole number"),
    (returning("None"), "is not (seconds between saves"),
    (returning("0, 3, 0.9"), "above 0"),
])  # fmt: skip
def test_a_plan_that_is_not_right(changes, words):
    (plan_week,) = solution("12", "plan_week", *changes)
    assert words in planned(plan_week(**CLUSTER), **CLUSTER)


# the Poisson distribution by the normal one
NORMAL = returning("interval, math.ceil(mean + 1.645 * math.sqrt(mean)), share")
# useful by the exponential distribution's exact formula, with an interval that was searched
EXACT = (
    RETURNED,
    """def useful(interval):
        return interval * rate / (math.exp(rate * restart) * math.expm1(rate * (interval + save)))

    interval = max(range(60, 40_000, 20), key=useful)
    return interval, spares, useful(interval)""",
)


@pytest.mark.parametrize("changes", [NORMAL, EXACT], ids=["normal", "exact"])
def test_a_plan_that_is_right_in_another_way(changes):
    (plan_week,) = solution("12", "plan_week", *changes)
    for nodes in (24, 32, 64, 128):
        cluster = CLUSTER | {"nodes": nodes}
        assert planned(plan_week(**cluster), **cluster) is None
