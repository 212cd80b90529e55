"""The graders of notebook 05, tuning: a scheduler, a search within its budget, a trainable that goes on.

A trial of Ray takes seconds to start: two answers to the last have one, the others are played in this process.
"""

import json
import pickle
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checks
import virtualgpu
from checks import notebook_05
from notebooks.scripts import tuning
from tests.processes import no_end


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


ASHA, MEDIAN = "ASHAScheduler", "MedianStoppingRule"
MUTATIONS = {"hyperparam_mutations": {"lr": [0.1, 0.01]}, "perturbation_interval": 4}
AT_4 = {"max_t": 16, "grace_period": 4}


@pytest.mark.parametrize("name, options, said", [
    (ASHA, {"max_t": 16, "grace_period": 1, "reduction_factor": 2}, "where do the late bloomers overtake?"),  # the first try
    (ASHA, {"max_t": 16, "grace_period": 1, "reduction_factor": 4}, "where do the late bloomers overtake?"),
    (ASHA, {"max_t": 16, "grace_period": 2, "reduction_factor": 2}, "where do the late bloomers overtake?"),
    (ASHA, {"max_t": 16, "grace_period": 8, "reduction_factor": 2}, "at most 60 % are allowed"),
    (ASHA, {"max_t": 16, "grace_period": 16}, "it spends 100 % of the rounds"),
    (ASHA, AT_4 | {"metric": "loss", "mode": "max"}, "its mode is 'max', which stops the trials of low loss, the good ones"),
    (ASHA, AT_4 | {"mode": "max"}, "its mode is 'max'"),
    (ASHA, AT_4 | {"metric": "accuracy", "mode": "max"}, "it looks at 'accuracy', and the trials report 'loss'"),
    (ASHA, AT_4 | {"time_attr": "epoch"}, "it counts by 'epoch', and the trials report training_iteration and time_total_s"),
    (MEDIAN, {"grace_period": 1}, "stops the best trial in 27 of 100 searches"),
    (MEDIAN, {}, "it spends 100 % of the rounds"),  # a minute's grace
    ("HyperBandScheduler", {"max_t": 16, "reduction_factor": 2}, "it spends 76 % of the rounds, and stops the best trial in 0"),
    ("HyperBandForBOHB", {"max_t": 16}, "HyperBandForBOHB asks for the controller's `search_alg`, which recorded losses have not"),
    ("PopulationBasedTraining", MUTATIONS, "take a scheduler that stops trials by their losses alone, such as ASHAScheduler"),
    ("FIFOScheduler", {}, "it spends 100 % of the rounds"),
    (ASHA, AT_4 | {"reduction_factor": 3}, "[passed]"),  # the solution
    (ASHA, AT_4 | {"reduction_factor": 2}, "[passed]"),
    (ASHA, {"max_t": 16, "grace_period": 5, "reduction_factor": 3}, "[passed]"),
    (ASHA, AT_4 | {"reduction_factor": 3, "metric": "loss", "mode": "min", "time_attr": "time_total_s"}, "[passed]"),
    (MEDIAN, {"grace_period": 6, "time_attr": "training_iteration"}, "[passed]"),
])  # fmt: skip
def test_frugal(says, tune, name, options, said):
    from ray.tune import schedulers

    says(said, checks.frugal, getattr(schedulers, name)(**options))


def test_frugal_changes_neither_scheduler_nor_numbers_and_says_what_is_none(says, tune):
    from ray.tune.schedulers import ASHAScheduler

    scheduler, before = ASHAScheduler(max_t=16, grace_period=4, reduction_factor=3, brackets=2), np.random.get_state()
    assert says("it spends", checks.frugal, scheduler) == says("it spends", checks.frugal, scheduler)
    assert (np.random.get_state()[1] == before[1]).all()
    says("TuneConfig is not a scheduler of Ray's", checks.frugal, tune.TuneConfig(scheduler=scheduler))
    says(
        "AsyncHyperBandScheduler is not a scheduler of Ray's, such as ASHAScheduler(...)", checks.frugal, ASHAScheduler
    )


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
    start(0.001).train(1)
    start(0.1).train(budget)


def twenty_for_two_rounds(start, budget):
    trials = [start(10 ** (-3.5 + k / 6.5)) for k in range(20)]
    loss = {trial: trial.train(2) for trial in trials}
    min(trials, key=loss.get).train(budget - 40)


@pytest.mark.parametrize("search, said", [
    (one(0.001), "on the pale images your network reads"),
    (one(0.01), "on the dark images your network reads"),  # the first try
    (lambda start, budget: halving(start, budget, first=50), "on the pale images"),  # looks before one learns
    (all_the_same, "on the pale images"),  # spread thin
    (beyond_the_budget, "of the budget of 200 rounds 199 are left"),
    (lambda start, budget: start(0.01), "no network was trained"),
    (lambda start, budget: start(0.01).train(-5), "rounds are whole numbers from 1 on"),
    (no_end, "after 120 seconds your code has not come to an end"),
    (lambda start, budget: sys.exit("enough"), "your code raised SystemExit: enough"),
    (coarse_grid, "[passed]"),
    (lambda start, budget: [start(lr).train(budget // 2) for lr in (0.001, 0.1)], "[passed]"),
    (twenty_for_two_rounds, "[passed]"),
])  # fmt: skip
def test_tunes(says, search, said):
    says(said, checks.tunes, search)


def test_tunes_trains_without_virtual_gpus_and_leaves_them_as_they_were(says, no_gpus_before):
    (gpu,) = virtualgpu.gpus(1)
    kept = torch.ones(3, device=gpu)

    def search(start, budget):
        assert virtualgpu.machine() is None, "virtual GPUs"
        halving(start, budget)

    says("[passed]", checks.tunes, search)
    assert virtualgpu.machine() is not None and kept.sum().item() == 3


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


def state_beside_a_pickle(config):
    """The number of the round is the checkpoint's metadata; a list has the rest."""
    from ray import tune

    checkpoint, worked = tune.get_checkpoint(), []
    if checkpoint:
        worked = pickle.loads(Path(checkpoint.to_directory(), "worked").read_bytes())
        assert checkpoint.get_metadata() == {"done": len(worked)}
    while len(worked) < 6:
        worked.append(config["work"](len(worked) + 1))
        folder = tempfile.mkdtemp()
        Path(folder, "worked").write_bytes(pickle.dumps(worked))
        checkpoint = tune.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"done": len(worked)})
        tune.report({"total": sum(worked), "more": "numbers"}, checkpoint=checkpoint)
        shutil.rmtree(folder)


def one_file_in_json(config):
    from ray import tune

    totals = [0]
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as saved:
            totals = json.loads(Path(saved, "totals.json").read_text("utf-8"))
    for round in range(len(totals), 7):
        totals.append(totals[-1] + config["work"](round))
        with tempfile.TemporaryDirectory() as saved:
            Path(saved, "totals.json").write_text(json.dumps(totals), "utf-8")
            tune.report({"total": totals[-1]}, checkpoint=tune.Checkpoint.from_directory(saved))


class Results(list):
    """As Ray's."""

    def __init__(self, trial, errors):
        super().__init__([trial])
        self.errors, self.num_errors = errors, len(errors)


@pytest.fixture
def played(tune, monkeypatch, tmp_path):
    """A trial that may fail once, in this process; what it reported is there when it starts again."""
    reports = [({}, None)]

    def report(metrics, *, checkpoint=None):
        if checkpoint is not None:
            kept = shutil.copytree(checkpoint.path, tmp_path / str(len(reports)))
            checkpoint = tune.Checkpoint(str(kept))
        reports.append((metrics, checkpoint or reports[-1][1]))

    def run(trainable, space):
        for _ in range(2):
            errors = []
            try:
                trainable(space)
                break
            except Exception:
                errors = [traceback.format_exc()]
        metrics, checkpoint = reports[-1]
        return Results(SimpleNamespace(metrics=metrics, checkpoint=checkpoint), errors)

    monkeypatch.setattr(tune, "report", report)
    monkeypatch.setattr(tune, "get_checkpoint", lambda: reports[-1][1])
    monkeypatch.setattr(notebook_05, "_run", run)


@pytest.mark.parametrize("trainable, said", [
    (lambda config: goes_on(config, forgets_the_total=True), "in total; it should be"),
    (does_not_work, "round 1 was worked 0 times"),
    (every_second, "was worked 2 times; it crashed once"),
    (catches_the_crash, "and left no checkpoint"),
    (lambda config: None, "round 1 was worked 0 times"),
    (lambda config: config["rounds"], "it ended with KeyError: 'rounds'"),
    (goes_on, "[passed]"),
    (state_beside_a_pickle, "[passed]"),
    (one_file_in_json, "[passed]"),
])  # fmt: skip
def test_goes_on(says, played, trainable, said):
    says(said, checks.goes_on, trainable)


@pytest.mark.parametrize("trainable, said", [
    (works_for_ever, "it ended with RuntimeError: hundreds of rounds: does the loop end?"),
    (state_beside_a_pickle, "[passed]"),
])  # fmt: skip
def test_goes_on_by_ray(capsys, cluster, trainable, said):
    """(A loop that does not end and does nothing is Watch's to tell: test_trials.)"""
    assert checks.goes_on(trainable) is (said == "[passed]")
    assert said in capsys.readouterr().out


def test_without_ray_the_grader_says_how_to_start_it(says, tune):
    tuning.stop_ray()
    says("start_ray(cpus=2) of notebooks/scripts/tuning.py starts it", checks.goes_on, goes_on)
