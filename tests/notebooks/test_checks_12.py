"""The graders of notebook 12: a search for the layout of a run, and the plan of a week in which nodes fail; and the table behind the search."""

import math
import random

import pytest

import checks
from checks.notebook_12 import TRIALS, planned, searched
from notebooks.scripts import plan_llama
from tests.notebooks.answers import PASSED, solution, table

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


def by_heart(run, layouts, try_layout, room):
    return {"tp": 2, "replicas": 1, "checkpointing": "none", "micro_batch": 2}


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
    (within(replicas=1, tp=1), "are possible"),
    (by_heart, "are possible"),
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


def by_dimension(run, layouts, try_layout, room):
    """One dimension after the other, with numbers and keys in another order."""
    now = next(
        x
        for x in sorted(layouts, key=lambda x: (-x["replicas"], x["micro_batch"]))
        if x["tp"] == 1 and x["checkpointing"] == "selective"
    )
    made = {tuple(now.values()): score(try_layout, now, room)}
    for _ in range(3):
        for key in ("micro_batch", "checkpointing", "replicas", "tp"):
            for layout in layouts:
                if len(made) == TRIALS:
                    break
                if tuple(layout.values()) not in made and all(layout[k] == now[k] for k in now if k != key):
                    made[tuple(layout.values())] = score(try_layout, layout, room)
                    now = min(now, layout, key=lambda x: made[tuple(x.values())])
    return dict(reversed(now.items()))


def by_formula(run, layouts, try_layout, room):
    """Sorted by what a pencil says of the messages, of the memory and of the recomputing, and the first of them tried."""
    rate = {"HDR": 8 * 25, "Ethernet 100": 12.5, None: 8 * 300}[run["network"]]  # GB/s of a node
    size = {"3B": 3.6, "8B": 8.0, "14B": 14.8}[run["model"]]
    card = {"H100": 400, "A100": 130, "A100-80GB": 130}[run["card"]]

    def pencil(x):
        rounds = run["texts"] * x["tp"] // run["gpus"] // x["micro_batch"]
        nodes = run["gpus"] // 8 // x["replicas"]
        over = 8 * size * (rounds if nodes > 1 else 1)
        again = {"none": 1, "selective": 1.1, "full": 1.3}[x["checkpointing"]] * (1 + 0.06 * math.log2(x["tp"]))
        computing = run["texts"] * run["length"] * 6 * size / card / run["gpus"] * again
        return max(computing, over / rate) + 0.3 * min(computing, over / rate)

    few, best = sorted(layouts, key=pencil)[: 3 * TRIALS], []
    for layout in few[::3]:
        best.append((score(try_layout, layout, room), list(layout.items())))
    return dict(min(best)[1])


@pytest.mark.parametrize("find_layout", [climb, by_dimension, by_formula])
def test_a_search_that_is_right_in_another_way(find_layout):
    assert [*complaints(find_layout)] == [None] * len(TABLES)


def test_the_solution_searches_well_from_every_order():
    assert not any(complaints(*solution("12", "find_layout"), seeds=range(30)))


def test_the_grader_runs_the_search(says):
    says(PASSED, checks.finds_layouts, *solution("12", "find_layout"))
    says("", checks.finds_layouts, by_heart)  # what is wrong with it depends on the run that was drawn


@pytest.mark.parametrize("name", plan_llama.RUNS)
def test_a_row_of_the_table_comes_out_again(name):
    run = plan_llama.RUNS[name]
    quick = [row for row in TABLES[name] if row[0]["tp"] == 1]
    layout, seconds, gib = random.Random(name).choice(quick)
    assert plan_llama.trial(run, layout) == pytest.approx((seconds, gib), rel=2e-3)
    assert [row[0] for row in TABLES[name]] == [*plan_llama.layouts(run)]


def test_two_depths_give_the_whole_model():
    run = dict(model="3B", card="A100-80GB", gpus=16, network="HDR", texts=32, length=4096)
    layout = dict(tp=1, replicas=2, checkpointing="selective", micro_batch=1)
    seconds, _, before, after = plan_llama.one_rank(run, layout, 28, 2)
    assert plan_llama.trial(run, layout) == pytest.approx((seconds, max(before, after)), rel=0.02)


CLUSTER = dict(nodes=64, between=2000 * 3600.0, save=60.0, restart=1500.0)
RETURNED = "return interval, spares, share"


def returning(text: str) -> tuple[str, str]:
    return RETURNED, f"return {text}"


@pytest.mark.parametrize("changes, words", [
    (("2 * save / rate", "2 * save * between"), "How often does one of 64 nodes fail"),
    (returning("interval / 3600, spares, share"), "are possible"),
    (("(interval / 2 + restart)", "interval / 2"), "lost work and restarts"),
    ((" - rate * (interval / 2 + restart)", ""), "lost work and restarts"),
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
# spares from weeks of its own, as a float
DRAWN = (
    RETURNED,
    """draws, counts = random.Random(5), []
    for _ in range(2000):
        count, now = 0, draws.expovariate(mean)
        while now < 1:
            count, now = count + 1, now + draws.expovariate(mean)
        counts.append(count)
    return 1.15 * interval, float(sorted(counts)[1900]), share""",
)


@pytest.mark.parametrize("changes", [NORMAL, EXACT, DRAWN], ids=["normal", "exact", "drawn"])
def test_a_plan_that_is_right_in_another_way(changes):
    (plan_week,) = solution("12", "plan_week", *changes, random=random)
    for nodes in (24, 32, 64, 128):
        cluster = CLUSTER | {"nodes": nodes}
        assert planned(plan_week(**cluster), **cluster) is None


test_the_grader_draws_clusters = table(checks.plans_a_week, "12", "plan_week", [
    ((), PASSED),
    (returning("interval, round(mean), share"), "95% are asked"),
])  # fmt: skip
