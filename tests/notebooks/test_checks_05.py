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
from tests.notebooks.answers import PASSED, table


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
    (ASHA, AT_4 | {"reduction_factor": 3}, PASSED),  # the solution
    (ASHA, AT_4 | {"reduction_factor": 2}, PASSED),
    (ASHA, {"max_t": 16, "grace_period": 5, "reduction_factor": 3}, PASSED),
    (ASHA, AT_4 | {"reduction_factor": 3, "metric": "loss", "mode": "min", "time_attr": "time_total_s"}, PASSED),
    (MEDIAN, {"grace_period": 6, "time_attr": "training_iteration"}, PASSED),
])  # fmt: skip
def test_frugal(says, tune, name, options, said):
    from ray.tune import schedulers

    says(said, checks.frugal, getattr(schedulers, name)(**options))


BEFORE, MEDIAN_OF, NOTED = (
    'self.seen.get(result["training_iteration"])',
    "np.median(before)",
    "        before.append(loss)\n",
)
WORSE, RUNGS, IS_NONE = "worse = bool(before) and loss > np.median(before)", "{4: [], 8: []}", "before is None"

test_a_rule_of_ones_own = table(checks.frugal, "05", "MyRule()", [
    (("TrialScheduler.STOP if worse else ", ""), "it spends 100 % of the rounds"),  # the first try
    ((RUNGS, "{1: [], 2: [], 4: [], 8: []}"), "where do the late bloomers overtake?"),
    (("        if " + IS_NONE, "        if loss > 2.0:\n            return TrialScheduler.STOP\n        if " + IS_NONE), "where do the late bloomers overtake?"),
    ((WORSE, "worse = loss < 0.9"), "of 100 searches: does it stop the trials of low loss, the good ones?"),
    ((RUNGS, "{8: []}"), "it spends 76 % of the rounds, and stops the best trial in 0 of 100 searches; at most 60 %"),
    # early rounds against others' late ones
    ((NOTED, "", BEFORE, "self.seen[4]", IS_NONE, 'before.append(loss) or result["training_iteration"] < 4', WORSE, "worse = loss > 3 * min(before)"),
     "and stops the best trial in"),
    (("return TrialScheduler.CONTINUE", "return None"), "on_trial_result returned None; it answers TrialScheduler.CONTINUE or STOP"),
    (("TrialScheduler.STOP", '"stop"'), "it answers TrialScheduler.CONTINUE or STOP"),
    ((WORSE, "1 / 0"), "your code raised ZeroDivisionError"),
    ((RUNGS, "{4: []}", MEDIAN_OF, "np.quantile(before, 1 / 3)"), PASSED),
    # half way: is it far above the lowest loss that any trial had by then?
    ((BEFORE, 'self.seen.setdefault(result["training_iteration"], [])', IS_NONE, 'result["training_iteration"] < 5', MEDIAN_OF, "1.5 * min(before)"), PASSED),
    # what has stopped falling and is not among the lowest ends
    ((NOTED, "", BEFORE, "self.seen.setdefault(trial.trial_id, [])", RUNGS, "{}", IS_NONE, "before.append(loss) or len(before) < 5",
      WORSE, "worse = before[-4] - loss < 0.05 and loss > 0.05 + min(min(losses) for losses in self.seen.values())"), PASSED),
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
    (lambda config: None, "round 1 was worked 0 times"),
    (lambda config: config["rounds"], "it ended with KeyError: 'rounds'"),
    ((), PASSED),
    (state_beside_a_pickle, PASSED),
    (("map(int, file.read().split())", "json.load(file)", 'file.write(f"{round} {total}")', "json.dump([round, total], file)"), PASSED),
], json=json))  # fmt: skip


@pytest.mark.parametrize("trainable, said", [
    (works_for_ever, "it ended with RuntimeError: hundreds of rounds: does the loop end?"),
    (state_beside_a_pickle, PASSED),
])  # fmt: skip
def test_goes_on_by_ray(capsys, cluster, trainable, said):
    """(A loop that does not end and does nothing is Watch's to tell: test_trials.)"""
    assert checks.goes_on(trainable) is (said == PASSED)
    assert said in capsys.readouterr().out


def test_without_ray_the_grader_says_how_to_start_it(says, tune):
    tuning.stop_ray()
    says("start_ray(cpus=2) of notebooks/scripts/tuning.py starts it", checks.goes_on, state_beside_a_pickle)
