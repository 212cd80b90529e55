"""The graders of notebook 05, tuning: a stopping rule, a trainable that goes on.

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

import checks
from checks import notebook_05
from notebooks.scripts import tuning


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


@pytest.fixture
def rule():
    """rule(stops): a scheduler written as in the exercise; stops(loss, round, trial, remembered) -> whether, or an answer of its own."""
    from ray.tune.schedulers import FIFOScheduler

    class MyRule(FIFOScheduler):
        def __init__(self, stops):
            super().__init__()
            self.stops, self.remembered = stops, {}

        def on_trial_result(self, controller, trial, result):
            said = self.stops(result["loss"], result["training_iteration"], trial.trial_id, self.remembered)
            return {True: "STOP", False: "CONTINUE"}.get(said, said) if isinstance(said, bool) else said

    return MyRule


def at_rungs(*rungs, keep=0.5):
    """ASHA by hand."""

    def stops(loss, round, trial, seen):
        if round not in rungs:
            return False
        before = seen.setdefault(round, [])
        worse = bool(before) and loss > np.quantile(before, keep)
        before.append(loss)
        return bool(worse)

    return stops


def far_from_the_best(loss, round, trial, seen):
    """Half way: is it far above the lowest loss that any trial had by then?"""
    seen[round] = min(loss, seen.get(round, 9.0))
    return round >= 5 and loss > 1.5 * seen[round]


def no_longer_falls(loss, round, trial, seen):
    """What has stopped falling and is not among the lowest ends."""
    losses = seen.setdefault(trial, [])
    losses.append(loss)
    lowest = min(min(others) for others in seen.values())
    return len(losses) > 4 and losses[-4] - loss < 0.05 and loss > lowest + 0.05


def lowest_of_all(loss, round, trial, seen):
    """Compares early rounds with others' late ones."""
    lowest = seen["lowest"] = min(loss, seen.get("lowest", 9.0))
    return round >= 4 and loss > 3 * lowest


@pytest.mark.parametrize("stops, said", [
    (lambda *seen: False, "it spends 100 % of the rounds"),  # the first try
    (at_rungs(1, 2, 4, 8), "where do the late bloomers overtake?"),
    (lambda loss, *seen: loss > 2.0, "where do the late bloomers overtake?"),
    (lambda loss, round, *seen: round >= 4 and loss < 0.8, "in 97 of 100 searches: does it stop the trials of low loss, the good ones?"),
    (at_rungs(8), "it spends 76 % of the rounds, and stops the best trial in 0 of 100 searches; at most 60 %"),
    (lowest_of_all, "and stops the best trial in"),
    (lambda *seen: None, "on_trial_result returned None; it answers TrialScheduler.CONTINUE or STOP"),
    (lambda loss, *seen: loss > 1 and "stop", "it answers TrialScheduler.CONTINUE or STOP"),
    (lambda *seen: 1 / 0, "your code raised ZeroDivisionError"),
    (at_rungs(4, 8), "[passed]"),  # the solution
    (at_rungs(4, keep=1 / 3), "[passed]"),
    (far_from_the_best, "[passed]"),
    (no_longer_falls, "[passed]"),
])  # fmt: skip
def test_a_rule_of_ones_own(says, rule, stops, said):
    says(said, checks.frugal, rule(stops))


def test_frugal_changes_neither_scheduler_nor_numbers_and_says_what_is_none(says, tune):
    from ray.tune.schedulers import ASHAScheduler

    scheduler, before = ASHAScheduler(max_t=16, grace_period=4, reduction_factor=3, brackets=2), np.random.get_state()
    assert says("it spends", checks.frugal, scheduler) == says("it spends", checks.frugal, scheduler)
    assert (np.random.get_state()[1] == before[1]).all()
    says("TuneConfig is not a scheduler of Ray's", checks.frugal, tune.TuneConfig(scheduler=scheduler))
    says("AsyncHyperBandScheduler is a class: hand over an object of it", checks.frugal, ASHAScheduler)
    says(
        "SimpleNamespace is not a scheduler of Ray's: let its class inherit",
        checks.frugal,
        SimpleNamespace(on_trial_result=print),
    )


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
