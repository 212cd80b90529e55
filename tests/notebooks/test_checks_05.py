"""The graders of notebook 05, tuning: the search space, a search within its budget, a trainable that goes on.

What the notebook itself shows, the first try and the solution of each, is not tried again: a trial takes seconds to start.
"""

import random
import sys
import tempfile
from pathlib import Path

import pytest

import checks
from checks import notebook_05
from helpers import tuning


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(
        sys.modules[__name__]
    )  # as a notebook's functions: trials do not import this
    yield tuning.start_ray(cpus=2)
    tuning.stop_ray()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def tune():
    from ray import tune

    return tune


def right_space(tune):
    return {"lr": tune.loguniform(1e-4, 0.1), "batch_size": tune.choice([16, 32, 64]), "dropout": tune.uniform(0, 0.5)}


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda tune: {}, "[passed]"),
        (lambda tune: {"lr": tune.uniform(1e-4, 0.1)}, "lr: half of the draws are below 0.0"),
        (lambda tune: {"lr": tune.loguniform(1e-3, 1)}, "lr: 2,000 draws lie between"),
        (lambda tune: {"lr": tune.loguniform(1.4e-4, 0.1)}, "lr: 2,000 draws come no nearer to 0.0001 than"),
        (lambda tune: {"lr": tune.loguniform(1e-4, 0.085)}, "lr: 2,000 draws come no nearer to 0.1 than"),
        (lambda tune: {"dropout": tune.uniform(0.1, 0.5)}, "dropout: half of the draws are below"),
        (lambda tune: {"dropout": tune.uniform(0, 0.42)}, "dropout: half of the draws are below"),
        (lambda tune: {"dropout": tune.uniform(0.01, 0.5)}, "dropout: 2,000 draws come no nearer to 0 than"),
        (lambda tune: {"dropout": tune.randn(0.25, 0.05)}, "dropout: a quarter of the draws are below"),
        (lambda tune: {"batch_size": tune.choice([16, 16, 16, 16, 32, 64])}, "of the draws; it should be a third"),
        (lambda tune: {"lr": tune.sample_from(lambda _: 10 ** random.uniform(-4, -1))}, "[passed]"),
        (lambda tune: {"batch_size": tune.sample_from(lambda _: random.choice([16, 32, 64]))}, "[passed]"),
        (lambda tune: {"batch_size": tune.choice((64, 32, 16))}, "[passed]"),
        (lambda tune: {"dropout": tune.quniform(0, 0.5, 0.01)}, "[passed]"),
        (lambda tune: {"batch_size": tune.grid_search([16, 32, 64])}, "each entry should be something of tune's"),
        (lambda tune: {"batch_size": tune.choice([16, 32])}, "batch_size: it draws"),
        (lambda tune: {"dropout": 0.5}, "each entry should be something of tune's"),
        (lambda tune: {"momentum": tune.uniform(0, 1)}, "it has ['batch_size', 'dropout', 'lr', 'momentum']"),
    ],
)
def test_search_space(capsys, tune, change, complaint):
    checks.search_space(right_space(tune) | change(tune))
    assert complaint in capsys.readouterr().out


def asha():
    from ray.tune.schedulers import ASHAScheduler

    return ASHAScheduler(max_t=16, grace_period=1, reduction_factor=3)


@pytest.mark.parametrize(
    "trials, mode, complaint",
    [
        (3, "min", "it tried 3 learning rates; try at least 20"),
        (20, "max", "the best of 20 learning rates was stopped after"),  # a cheat: stops, but the wrong ones
    ],
)
def test_frugal(capsys, cluster, tune, trials, mode, complaint):
    from ray.tune.search.basic_variant import BasicVariantGenerator

    # the trial that comes first is never stopped, and so must not be the best
    far = BasicVariantGenerator(points_to_evaluate=[{"lr": 1.0}])
    search = tune.TuneConfig(metric="loss", mode=mode, num_samples=trials, scheduler=asha(), search_alg=far)
    checks.frugal(search)
    out = capsys.readouterr().out
    assert complaint in out, out


def test_a_search_that_is_too_slow(capsys, cluster, tune, monkeypatch):
    """As on a busy machine: some trials have no result, and so no setting that could be looked at."""
    monkeypatch.setattr(notebook_05, "LIMIT", 0.1)
    checks.frugal(tune.TuneConfig(metric="loss", mode="min", num_samples=20))
    assert "trials had not reported when 0.1 seconds were over" in capsys.readouterr().out


def goes_on(config, forgets_the_total=False, every=1):
    from ray import tune

    checkpoint, done, total = tune.get_checkpoint(), 0, 0
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            done, total = map(int, Path(saved, "state").read_text().split())
    if forgets_the_total:
        total = 0
    for round in range(done + 1, 7):
        total += config["work"](round)
        with tempfile.TemporaryDirectory() as saved:
            Path(saved, "state").write_text(f"{round} {total}")
            kept = tune.Checkpoint.from_directory(saved) if round % every == 0 else None
            tune.report({"total": total}, checkpoint=kept)


def every_second(config):
    """A checkpoint too rarely: the crash loses a round."""
    return goes_on(config, every=2)


def catches_the_crash(config):
    """And starts from nothing where its process is killed."""
    from ray import tune

    total = 0
    for round in range(1, 7):
        try:
            total += config["work"](round)
        except RuntimeError:
            total += config["work"](round)
        tune.report({"total": total})


def does_not_work(config):
    """A cheat: reports, and works nothing."""
    from ray import tune

    for round in range(1, 7):
        tune.report({"total": 1000 * round})


def works_for_ever(config):
    while True:
        config["work"](1)


@pytest.mark.parametrize(
    "trainable, complaint",
    [
        (lambda config: goes_on(config, forgets_the_total=True), "in total; it should be"),
        (does_not_work, "round 1 was worked 0 times"),
        (every_second, "was worked 2 times; it crashed once"),
        (catches_the_crash, "and left no checkpoint"),
        (works_for_ever, "does the loop end?"),
        (lambda config: undefined, "name 'undefined' is not defined"),  # noqa: F821
    ],
)
def test_goes_on(capsys, cluster, trainable, complaint):
    """(A loop that does not end and does nothing is Watch's to tell: test_trials.)"""
    checks.goes_on(trainable)
    out = capsys.readouterr().out
    assert complaint in out, out


def test_without_ray_the_graders_say_how_to_start_it(capsys, tune):
    tuning.stop_ray()
    checks.frugal(tune.TuneConfig(metric="loss", mode="min", num_samples=20))
    checks.goes_on(goes_on)
    assert capsys.readouterr().out.count("helpers.tuning.start_ray(cpus=2) starts it") == 2
