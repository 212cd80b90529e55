"""The graders of notebook 05: tuning."""

from collections.abc import Callable, Mapping

from checks.grader import grader


@grader
def search_space(space: Mapping) -> str | None:
    """lr log-uniform from 1e-4 to 0.1, batch_size one of 16, 32, 64, dropout uniform from 0 to 0.5; judged by drawing."""
    if set(space) != {"lr", "batch_size", "dropout"}:
        return f"it has {sorted(space)}, and should have batch_size, dropout, lr"
    try:
        drawn = {name: sorted(domain.sample(size=2000, random_state=0)) for name, domain in space.items()}
    except AttributeError:
        return "each entry should be something of tune's that can be drawn from, such as tune.uniform(0, 1)"
    for name, (low, middle, high) in {"lr": (1e-4, 10**-2.5, 0.1), "dropout": (0, 0.25, 0.5)}.items():
        first, median, last = drawn[name][0], drawn[name][1000], drawn[name][-1]
        if first < low or last > high or last < 0.8 * high:
            return f"{name}: 2,000 draws lie between {first:.4f} and {last:.4f}, not {low} and {high}"
        if not 0.8 * middle < median < 1.25 * middle:
            return f"{name}: half of the draws are below {median:.4f}; it should be about {middle:.4f}"
    if set(drawn["batch_size"]) != {16, 32, 64}:
        return f"batch_size: it draws {sorted(set(drawn['batch_size']))[:5]}"
    return None


@grader
def epochs_spent(spent: Callable[[int, int, int], int]) -> str | None:
    """spent(n, max_t, factor) as successive halving in step needs."""
    for n, max_t, factor in ((8, 8, 2), (12, 16, 2), (27, 9, 3), (10, 12, 4), (1, 5, 2)):
        if (got := spent(n, max_t, factor)) != (right := _halving(n, max_t, factor)):
            return f"{n} trials, at most {max_t} epochs, factor {factor}: {got} epochs; it should be {right}"
    return None


@grader
def reduction_factor(choose: Callable[[int, int, int], int]) -> str | None:
    """choose(n, max_t, budget) is the smallest factor from 2 whose halving stays within the budget."""
    for n, max_t, budget in ((12, 16, 40), (12, 16, 34), (27, 27, 75), (64, 16, 150)):
        got = choose(n, max_t, budget)
        if (needs := _halving(n, max_t, got)) > budget:
            return f"{n} trials of at most {max_t} epochs: factor {got} needs {needs}, and the budget is {budget}"
        if got > 2 and _halving(n, max_t, got - 1) <= budget:
            return f"{n} trials of at most {max_t} epochs: factor {got - 1} stays within {budget} as well"
    return None


def _halving(n: int, max_t: int, factor: int) -> int:
    spent, reached, rung = 0, 0, 1
    while reached < max_t:
        rung = min(rung, max_t)
        spent += n * (rung - reached)
        reached, rung, n = rung, rung * factor, max(1, n // factor)
    return spent
