"""The graders of notebook 05, tuning: the search space, and successive halving."""

import pytest

import checks


def right_space():
    from ray import tune

    return {"lr": tune.loguniform(1e-4, 0.1), "batch_size": tune.choice([16, 32, 64]), "dropout": tune.uniform(0, 0.5)}


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda tune: {}, "[passed]"),
        (lambda tune: {"lr": tune.uniform(1e-4, 0.1)}, "lr: half of the draws are below 0.0"),
        (lambda tune: {"lr": tune.loguniform(1e-3, 1)}, "lr: 2,000 draws lie between"),
        (lambda tune: {"batch_size": tune.choice([16, 32])}, "batch_size: it draws [16, 32]"),
        (lambda tune: {"dropout": 0.5}, "each entry should be something of tune's"),
        (lambda tune: {"momentum": tune.uniform(0, 1)}, "it has ['batch_size', 'dropout', 'lr', 'momentum']"),
    ],
)
def test_search_space(capsys, change, complaint):
    from ray import tune

    checks.search_space(right_space() | change(tune))
    assert complaint in capsys.readouterr().out


def halving(n, max_t, factor):
    spent, reached, rung = 0, 0, 1
    while reached < max_t:
        rung = min(rung, max_t)
        spent, reached, rung, n = spent + n * (rung - reached), rung, rung * factor, max(1, n // factor)
    return spent


def smallest(n, max_t, budget):
    return next(factor for factor in range(2, 100) if halving(n, max_t, factor) <= budget)


@pytest.mark.parametrize(
    "grade, answer, complaint",
    [
        (checks.epochs_spent, lambda n, max_t, factor: n * max_t, "64 epochs; it should be 20"),
        (checks.epochs_spent, halving, "[passed]"),
        (checks.reduction_factor, lambda n, max_t, budget: 2, "factor 2 needs 36, and the budget is 34"),
        (checks.reduction_factor, lambda n, max_t, budget: 9, "factor 8 stays within 40 as well"),
        (checks.reduction_factor, smallest, "[passed]"),
    ],
)
def test_halving(capsys, grade, answer, complaint):
    grade(answer)
    assert complaint in capsys.readouterr().out
