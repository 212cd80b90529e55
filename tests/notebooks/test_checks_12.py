"""The graders of notebook 12: a search for the layout of a run, and the plan of a week in which nodes fail; and the table behind the search."""

import math
import random

import pytest
import series

import checks
from checks.notebook_12 import TRIALS, planned, searched
from notebooks.scripts import plan_llama

TABLES = {name: plan_llama.table(name) for name in plan_llama.RUNS}


def solution(name):
    """That function of the lesson's solution."""
    (path,) = (path for path in series.notebooks() if path.name.startswith("12"))
    (cell,) = (c for c in series.read(path).cells if "@title Solution" in c.source and f"def {name}" in c.source)
    names: dict = {}
    exec(cell.source.rsplit("\n\nchecks.", 1)[0], names)
    return names[name]


def score(try_layout, layout, room):
    seconds, gib = try_layout(layout)
    return max(gib - room, 0), seconds


def sweep(run, layouts, try_layout, room):
    return min(layouts, key=lambda layout: score(try_layout, layout, room))


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


def tensor_parallel_always(run, layouts, try_layout, room):
    few = [layout for layout in layouts if layout["tp"] == 8][:TRIALS]
    return min(few, key=lambda layout: score(try_layout, layout, room))


def one_group_always(run, layouts, try_layout, room):
    few = [layout for layout in layouts if layout["replicas"] == 1 and layout["tp"] == 1][:TRIALS]
    return min(few, key=lambda layout: score(try_layout, layout, room))


def by_heart(run, layouts, try_layout, room):
    return {"tp": 2, "replicas": 1, "checkpointing": "none", "micro_batch": 2}


def nothing(run, layouts, try_layout, room):
    score(try_layout, layouts[0], room)


def complaints(find_layout):
    """Of all runs, the layouts in one order."""
    for name, rows in TABLES.items():
        run = plan_llama.RUNS[name]
        yield searched(find_layout, run, rows, plan_llama.room(run), random.Random(0))


@pytest.mark.parametrize(
    "find_layout, words",
    [
        (sweep, f"more than {TRIALS} trials"),
        (swallowed, f"makes {TRIALS + 1} trials"),
        (fastest_of_all, "there is room for"),
        (tensor_parallel_always, "are possible"),
        (one_group_always, "are possible"),
        (by_heart, "are possible"),
        (nothing, "which is not one of the layouts"),
    ],
)
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
    find_layout = solution("find_layout")
    for name, rows in TABLES.items():
        run = plan_llama.RUNS[name]
        for seed in range(30):
            assert not searched(find_layout, run, rows, plan_llama.room(run), random.Random(seed)), (name, seed)


def test_the_grader_runs_the_search(capsys):
    assert checks.finds_layouts(solution("find_layout"))
    assert not checks.finds_layouts(by_heart)
    assert "passed" in capsys.readouterr().out


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


def week(nodes, between, save, restart):
    return solution("plan_week")(nodes, between, save, restart)


def interval_of_one_node(nodes, between, save, restart):
    _, spares, share = week(nodes, between, save, restart)
    return math.sqrt(2 * save * between), spares, share


def in_hours(nodes, between, save, restart):
    interval, spares, share = week(nodes, between, save, restart)
    return interval / 3600, spares, share


def no_restarts(nodes, between, save, restart):
    interval, spares, share = week(nodes, between, save, restart)
    return interval, spares, share + nodes / between * restart


def saves_alone(nodes, between, save, restart):
    interval, spares, _ = week(nodes, between, save, restart)
    return interval, spares, 1 - save / interval


def mean_failures(nodes, between, save, restart):
    interval, _, share = week(nodes, between, save, restart)
    return interval, round(nodes * 7 * 24 * 3600 / between), share


def too_many(nodes, between, save, restart):
    interval, spares, share = week(nodes, between, save, restart)
    return interval, 2 * spares, share


def half_a_node(nodes, between, save, restart):
    interval, spares, share = week(nodes, between, save, restart)
    return interval, spares - 0.5, share


@pytest.mark.parametrize(
    "plan_week, words",
    [
        (interval_of_one_node, "How often does one of 64 nodes fail"),
        (in_hours, "are possible"),
        (no_restarts, "lost work and restarts"),
        (saves_alone, "lost work and restarts"),
        (mean_failures, "95% are asked"),
        (too_many, "more than 95% of the weeks need"),
        (half_a_node, "a whole number"),
        (lambda **cluster: None, "is not (seconds between saves"),
        (lambda **cluster: (0, 3, 0.9), "above 0"),
    ],
)
def test_a_plan_that_is_not_right(plan_week, words):
    assert words in planned(plan_week(**CLUSTER), **CLUSTER)


def normal(nodes, between, save, restart):
    """The Poisson distribution by the normal one."""
    interval, _, share = week(nodes, between, save, restart)
    mean = nodes * 7 * 24 * 3600 / between
    return interval, math.ceil(mean + 1.645 * math.sqrt(mean)), share


def exact(nodes, between, save, restart):
    """Useful by the exponential distribution's exact formula, with an interval that was searched."""
    rate = nodes / between

    def share(interval):
        return interval * rate / (math.exp(rate * restart) * math.expm1(rate * (interval + save)))

    _, spares, _ = week(nodes, between, save, restart)
    interval = max(range(60, 40_000, 20), key=share)
    return interval, spares, share(interval)


def drawn(nodes, between, save, restart):
    """Spares from weeks of its own, as a float."""
    interval, _, share = week(nodes, between, save, restart)
    draws, mean = random.Random(5), nodes * 7 * 24 * 3600 / between
    counts = []
    for _ in range(2000):
        count, now = 0, draws.expovariate(mean)
        while now < 1:
            count, now = count + 1, now + draws.expovariate(mean)
        counts.append(count)
    return 1.15 * interval, float(sorted(counts)[1900]), share


@pytest.mark.parametrize("plan_week", [normal, exact, drawn])
def test_a_plan_that_is_right_in_another_way(plan_week):
    for nodes in (24, 32, 64, 128):
        cluster = CLUSTER | {"nodes": nodes}
        assert planned(plan_week(**cluster), **cluster) is None


def test_the_grader_draws_clusters():
    assert checks.plans_a_week(solution("plan_week"))
    assert not checks.plans_a_week(mean_failures)
