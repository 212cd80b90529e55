"""The graders of notebook 03: the table of a pipeline, and cut and pieces for a budget."""

import numpy as np
import pytest

import checks
from checks import notebook_03
from tests.processes import no_end

pytestmark = pytest.mark.usefixtures("no_gpus_before")


def gpipe(stages, pieces, last_first=True):
    order = range(pieces)[::-1] if last_first else range(pieces)
    rows = []
    for s in range(stages):
        before, after = [None] * s, [None] * (stages - 1 - s)
        forward, backward = [f"F{i}" for i in range(pieces)], [f"B{i}" for i in order]
        rows.append([*before, *forward, *after, *after, *backward, *before])
    return rows


def one_f_one_b(stages, pieces):
    """Each stage begins backward as soon as it can."""
    rows, done = [[] for _ in range(stages)], [{} for _ in range(stages)]
    for slot in range(2 * (pieces + stages - 1)):
        for s, row in enumerate(rows):
            forward, backward = (sum(work.startswith(way) for work in done[s]) for way in "FB")
            may_back = backward < forward and (s == stages - 1 or done[s + 1].get(f"B{backward}", slot) < slot)
            may_go = forward < pieces and forward - backward < stages - s
            may_go = may_go and (s == 0 or done[s - 1].get(f"F{forward}", slot) < slot)
            work = f"B{backward}" if may_back else f"F{forward}" if may_go else None
            row.append(work)
            if work:
                done[s][work] = slot
    return rows


def swapped(rows, one, other):
    exchange = {one: other, other: one}
    return [[exchange.get(work, work) for work in row] for row in rows]


@pytest.mark.parametrize(
    "table, said",
    [
        (lambda m, n: [[*row, None] for row in gpipe(m, n)], "with 2 stages and 4 micro-batches, each stage waits 3 of 11 slots; it need not wait more than 2"),
        (lambda m, n: [[f"F{i}" for i in range(n)] + [f"B{i}" for i in range(n)] for _ in range(m)], "stage 1 begins F0 in slot 0, before stage 0 has finished it"),
        (lambda m, n: [[work and work.replace("B", "F") for work in row] for row in gpipe(m, n)], "stage 0 should have each of F0 to F3 once"),
        (lambda m, n: [[work if work and work[0] == "F" else None for work in row] for row in gpipe(m, n)], "stage 0 should have each of B0 to B3 once"),
        # forwards right, backward in the direction of forward
        (lambda m, n: [[None] * s + [f"F{i}" for i in range(n)] + [None] * (m - 1) + [f"B{i}" for i in range(n)] + [None] * (m - 1 - s) for s in range(m)],
         "stage 0 begins B0 in slot 5, before stage 1 has finished it"),
        (lambda m, n: swapped(gpipe(m, n), "F3", "B3"), ", before its own F3"),
        (lambda m, n: gpipe(m, n)[:-1], "there should be 2 rows of one length"),
        (lambda m, n: 1 / 0, "raised ZeroDivisionError"),
        (lambda m, n: gpipe(m, n) if (m, n) in ((2, 4), (3, 4), (4, 8)) else [], "there should be 5 rows"),
        (lambda m, n: gpipe(m, n) if n >= m else gpipe(m, m), "with 5 stages and 2 micro-batches, stage 0 should have"),
        (lambda m, n: [["." if work is None else work for work in row] for row in gpipe(m, n)], "something besides F, B and None"),
        (lambda m, n: [[None if work is None else int(work[1:]) for work in row] for row in gpipe(m, n)], "stage 0 should have each of F0 to F3 once"),
        (lambda m, n: None, "it returns None; a list of rows is wanted"),
        (no_end, "after 20 seconds rank 0 stands in ... in no_end ... does your loop end?"),
        (gpipe, "[passed]"),
        (lambda m, n: gpipe(m, n, last_first=False), "[passed]"),
        (one_f_one_b, "[passed]"),
        (lambda m, n: (iter(row) for row in gpipe(m, n)), "[passed]"),
        (lambda m, n: np.array(gpipe(m, n), dtype=object), "[passed]"),
        (lambda m, n: [[work and (work[0], int(work[1:])) for work in row] for row in gpipe(m, n)], "[passed]"),
    ],
)  # fmt: skip
def test_slots(says, table, said):
    says(said, checks.slots, table)


def best_of(pairs, measure, budget):
    measured = {pair: measure(*pair) for pair in pairs}
    fitting = [pair for pair in pairs if measured[pair][1] <= budget]
    return min(fitting, key=lambda pair: measured[pair][0], default=None)


def cut_then_size(cuts, sizes, measure, budget):
    found = best_of([(cut, sizes[len(sizes) // 2]) for cut in cuts], measure, budget)
    return best_of([(found[0], size) for size in sizes], measure, budget) if found else None


def size_then_cut(cuts, sizes, measure, budget):
    middle = cuts[len(cuts) // 2]
    _, size = best_of([(middle, size) for size in sizes], measure, float("inf"))
    return best_of([(cut, size) for cut in cuts], measure, budget)


def every_pair(cuts, sizes, measure, budget):
    return best_of([(cut, size) for cut in cuts for size in sizes], measure, budget)


def every_pair_caught(cuts, sizes, measure, budget):
    try:
        return every_pair(cuts, sizes, measure, budget)
    except Exception:
        return None


def even_in_memory(cuts, sizes, measure, budget):
    even = min(cuts, key=lambda cut: measure(cut, 20)[1])
    return best_of([(even, size) for size in sizes], measure, budget)


def pieces_of_20(cuts, sizes, measure, budget):
    return best_of([(cut, 20) for cut in cuts], measure, budget)


def no_budget(cuts, sizes, measure, budget):
    return cut_then_size(cuts, sizes, measure, float("inf"))


def fastest_or_nothing(cuts, sizes, measure, budget):
    found = no_budget(cuts, sizes, measure, budget)
    return found if measure(*found)[1] <= budget else None


@pytest.mark.parametrize("choose, said", [
    (every_pair, "45 dry runs are allowed for 264 plans, and you asked for more"),
    (every_pair_caught, "and you asked for more"),
    (even_in_memory, "another plan that fits takes"),
    (pieces_of_20, "another plan that fits takes"),
    (no_budget, "and the budget is"),
    (fastest_or_nothing, "it found no plan for"),
    (lambda *case: cut_then_size(*case) or (11, 20), "nothing fits, return None"),
    (lambda *case: None, "it found no plan for"),
    (lambda *case: (11, 7), "it returned (11, 7), which is not a pair"),
    (lambda *case: 11, "raised TypeError"),
    (lambda *case: 1 / 0, "ZeroDivisionError"),
    (no_end, "after 20 seconds rank 0 stands in ... in no_end ... does your loop end?"),
    (cut_then_size, "[passed]"),
    (size_then_cut, "[passed]"),
    (lambda *case: list(found) if (found := size_then_cut(*case)) else None, "[passed]"),
    (lambda *case: np.array(found) if (found := cut_then_size(*case)) else None, "[passed]"),
])  # fmt: skip
def test_fastest_plan(says, choose, said):
    says(said, checks.fastest_plan, choose)


def test_a_right_answer_passes_whatever_is_drawn():
    for seed in range(60):
        table = notebook_03._pipelines(seed)
        cases = [(table, budget) for budget in notebook_03._budgets(table)]
        for choose in (cut_then_size, size_then_cut):
            for case, result in zip(cases, notebook_03._chosen(choose, cases), strict=True):
                assert notebook_03._plan_complaint(*case, *result) is None, seed
