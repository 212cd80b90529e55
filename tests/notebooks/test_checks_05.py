"""The graders of notebook 05, tuning: a scheduler, a search within its budget, a trainable that goes on.

A trial of Ray takes seconds to start: of `goes_on` what the notebook itself shows is not tried again.
"""

import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import checks
import virtualgpu
from helpers import tuning
from tests.processes import HURRY


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


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"grace_period": 4, "reduction_factor": 3}, "[passed]"),  # the solution
        ({"grace_period": 4, "reduction_factor": 2}, "[passed]"),
        ({"grace_period": 5, "reduction_factor": 3}, "[passed]"),
        ({"grace_period": 1, "reduction_factor": 2}, "where do the late bloomers overtake?"),  # the first try
        ({"grace_period": 1, "reduction_factor": 4}, "where do the late bloomers overtake?"),
        ({"grace_period": 2, "reduction_factor": 2}, "where do the late bloomers overtake?"),
        ({"grace_period": 8, "reduction_factor": 2}, "at most 60 % are allowed"),
        ({"grace_period": 16}, "it spends 100 % of the rounds"),
        (
            {"grace_period": 4, "metric": "loss", "mode": "max"},
            "where do the late bloomers overtake?",
        ),  # stops the good
    ],
)
def test_frugal(capsys, tune, options, complaint):
    from ray.tune.schedulers import ASHAScheduler

    checks.frugal(ASHAScheduler(max_t=16, **options))
    out = capsys.readouterr().out
    assert complaint in out, out


def test_frugal_does_not_change_the_scheduler_and_says_what_is_none(capsys, tune):
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    scheduler = ASHAScheduler(max_t=16, grace_period=4, reduction_factor=3)
    checks.frugal(scheduler)
    checks.frugal(scheduler)
    checks.frugal(FIFOScheduler())
    checks.frugal(tune.TuneConfig(scheduler=scheduler))
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["[passed] well done"] * 2
    assert "it spends 100 % of the rounds" in out[2]
    assert "TuneConfig is not a scheduler of Ray's" in out[3]


def halving(start, budget, first=16):
    trials = [start(10 ** (-3.5 + k / 2)) for k in range(7)]
    loss = {trial: trial.train(budget // first) for trial in trials}
    trials = sorted(trials, key=loss.get)[:3]
    loss = {trial: trial.train(budget // first) for trial in trials}
    min(trials, key=loss.get).train(budget - 10 * (budget // first))


def coarse_grid(start, budget):
    trials = [start(lr) for lr in (0.0003, 0.003, 0.03, 0.3)]
    loss = {trial: trial.train(budget // 10) for trial in trials}
    min(trials, key=loss.get).train(budget - 4 * (budget // 10))


def one(lr):
    return lambda start, budget: start(lr).train(budget)


def all_the_same(start, budget):
    for k in range(7):
        start(10 ** (-3.5 + k / 2)).train(budget // 7)


def beyond_the_budget(start, budget):
    for lr in (0.001, 0.1):
        start(lr).train(budget)


@pytest.mark.parametrize(
    "search, complaint",
    [
        (coarse_grid, "[passed]"),
        (lambda start, budget: [start(lr).train(budget // 2) for lr in (0.001, 0.1)], "[passed]"),
        (one(0.001), "on the pale images your network reads"),
        (one(0.01), "on the dark images your network reads"),  # the first try
        (lambda start, budget: halving(start, budget, first=50), "on the pale images"),  # looks before one learns
        (all_the_same, "on the pale images"),  # spread thin
        (beyond_the_budget, "of the budget of 200 rounds 0 are left"),
        (lambda start, budget: start(0.01), "no network was trained"),
        (lambda start, budget: start(0.01).train(-5), "rounds are whole numbers from 1 on"),
    ],
)
def test_tunes(capsys, search, complaint):
    checks.tunes(search)
    out = capsys.readouterr().out
    assert complaint in out, out


def test_tunes_trains_without_virtual_gpus_and_leaves_them_as_they_were(capsys, no_gpus_before):
    (gpu,) = virtualgpu.gpus(1)
    kept = torch.ones(3, device=gpu)

    def search(start, budget):
        assert virtualgpu.machine() is None, "virtual GPUs"
        halving(start, budget)

    checks.tunes(search)
    assert "[passed]" in capsys.readouterr().out
    assert virtualgpu.machine() is not None and kept.sum().item() == 3


def no_end(start, budget):
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("search, complaint", [
    (no_end, f"after {HURRY} seconds your code has not come to an end"),
    (lambda start, budget: sys.exit("enough"), "your code raised SystemExit: enough"),
])  # fmt: skip
def test_tunes_runs_the_search_in_a_process_of_its_own(capsys, search, complaint):
    checks.tunes(search, timeout=HURRY)
    assert complaint in capsys.readouterr().out


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
        (works_for_ever, "it ended with RuntimeError: hundreds of rounds: does the loop end?"),
    ],
)
def test_goes_on(capsys, cluster, trainable, complaint):
    """(A loop that does not end and does nothing is Watch's to tell: test_trials.)"""
    checks.goes_on(trainable)
    out = capsys.readouterr().out
    assert complaint in out, out


def test_without_ray_the_grader_says_how_to_start_it(capsys, tune):
    tuning.stop_ray()
    checks.goes_on(goes_on)
    assert "helpers.tuning.start_ray(cpus=2) starts it" in capsys.readouterr().out
