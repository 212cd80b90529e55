"""The graders of notebook 05, tuning: a stopping rule, a trainable that goes on.

A trial of Ray takes seconds to start, and the lesson's solution has one: here trials are played in this process.
"""

import json
import shutil
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import checks
from checks import notebook_05
from notebooks.scripts import tuning
from tests.notebooks.answers import PASSED, table


@pytest.fixture(scope="module")
def tune():
    from ray import tune

    return tune


ASHA, MEDIAN = "ASHAScheduler", "MedianStoppingRule"
AT_4 = {"max_t": 16, "grace_period": 4}


@pytest.mark.parametrize("name, options, said", [
    (ASHA, {"max_t": 16, "grace_period": 1, "reduction_factor": 2}, "where do the late bloomers overtake?"),  # the first try
    (ASHA, {"max_t": 16, "grace_period": 8, "reduction_factor": 2}, "at most 60 % are allowed"),
    (ASHA, {"max_t": 16, "grace_period": 16}, "it spends 100 % of the rounds"),
    (ASHA, AT_4 | {"metric": "loss", "mode": "max"}, "its mode is 'max', which stops the trials of low loss, the good ones"),
    (ASHA, AT_4 | {"metric": "accuracy", "mode": "max"}, "it looks at 'accuracy', and the trials report 'loss'"),
    (ASHA, AT_4 | {"time_attr": "epoch"}, "it counts by 'epoch', and the trials report training_iteration and time_total_s"),
    ("HyperBandScheduler", {"max_t": 16, "reduction_factor": 2}, "it spends 76 % of the rounds, and stops the best trial in 0"),
    ("HyperBandForBOHB", {"max_t": 16}, "HyperBandForBOHB asks for the controller's `search_alg`, which recorded losses have not"),
    (ASHA, AT_4 | {"reduction_factor": 3, "metric": "loss", "mode": "min", "time_attr": "time_total_s"}, PASSED),
    (MEDIAN, {"grace_period": 6, "time_attr": "training_iteration"}, PASSED),
])  # fmt: skip
def test_frugal(says, tune, name, options, said):
    from ray.tune import schedulers

    says(said, checks.frugal, getattr(schedulers, name)(**options))


test_a_rule_of_ones_own = table(checks.frugal, "05", "MyRule()", [
    (("worse = bool(before) and loss > np.median(before)", "worse = loss < 0.9"), "of 100 searches: does it stop the trials of low loss, the good ones?"),
    (("return TrialScheduler.CONTINUE", "return None"), "on_trial_result returned None; it answers TrialScheduler.CONTINUE or STOP"),
    # half way: is it far above the lowest loss that any trial had by then?
    (('self.seen.get(result["training_iteration"])', 'self.seen.setdefault(result["training_iteration"], [])', "before is None",
      'result["training_iteration"] < 5', "np.median(before)", "1.5 * min(before)"), PASSED),
])  # fmt: skip


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


def works_for_ever(config):
    while True:
        config["work"](1)


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


STATE = "done, total = map(int, file.read().split())"
KEEPS = "checkpoint=tune.Checkpoint.from_directory(folder)"
WORK = 'total += config["work"](round)'

test_goes_on = pytest.mark.usefixtures("played")(table(checks.goes_on, "05", "my_trainable", [
    ((STATE, "done, total = int(file.read().split()[0]), 0"), "in total; it should be"),
    ((WORK, "total += 1000"), "round 1 was worked 0 times"),  # a cheat: it reports, and works nothing
    ((KEEPS, KEEPS + " if round % 2 == 0 else None"), "was worked 2 times; it crashed once"),
    ((WORK, f"try: {WORK}\n        except RuntimeError: {WORK}", KEEPS, "checkpoint=None"), "and left no checkpoint"),
    (lambda config: config["rounds"], "it ended with KeyError: 'rounds'"),
    (works_for_ever, "it ended with RuntimeError: hundreds of rounds: does the loop end?"),
    (("map(int, file.read().split())", "json.load(file)", 'file.write(f"{round} {total}")', "json.dump([round, total], file)"), PASSED),
], json=json))  # fmt: skip


def test_without_ray_the_grader_says_how_to_start_it(says, tune):
    tuning.stop_ray()
    says("start_ray(cpus=2) of notebooks/scripts/tuning.py starts it", checks.goes_on, works_for_ever)
