"""The callback that says why a search does not go on. No Ray runs here: trials and cluster are stand-ins."""

import contextlib
import pickle
import signal
from types import SimpleNamespace

import pytest
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial

from notebooks.scripts import tuning


@pytest.fixture
def clock(monkeypatch):
    """A time that tests set."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(tuning.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 2.0})
    return now


@pytest.fixture
def watch(clock):
    watch = tuning.Watch(silence=100)
    watch.setup(total_num_samples=2)
    return watch


def trial(status, **resources):
    factory = SimpleNamespace(required_resources={"CPU": 1.0, **resources})
    return SimpleNamespace(status=status, placement_group_factory=factory, is_finished=lambda: False)


def test_more_than_there_is_is_told_at_once(watch):
    with pytest.raises(ValueError, match="a trial asks for 8 GPU, and the cluster has 2: it would wait for ever"):
        watch.on_step_begin(1, [trial(Trial.PENDING, GPU=8.0)])


@pytest.mark.parametrize("status", [Trial.RUNNING, Trial.PENDING])
def test_one_trial_too_large_beside_others_that_go_on(watch, status):
    watch.on_step_begin(1, [trial(Trial.PENDING, GPU=8.0), trial(status)])


def test_a_resource_that_nobody_has(watch):
    with pytest.raises(ValueError, match="asks for 1 tpu, and the cluster has 0"):
        watch.on_step_begin(1, [trial(Trial.PENDING, tpu=1.0)])


def test_a_cluster_of_which_nothing_is_left(watch, monkeypatch):
    """Its raylet was killed."""
    monkeypatch.setattr(tuning.ray, "cluster_resources", dict)
    with pytest.raises(ValueError, match=r"the cluster has 0: .*has a process of Ray's died\? start_ray\(\) starts it"):
        watch.on_step_begin(1, [trial(Trial.PENDING)])


def test_room_and_no_trial_begins(watch, clock, monkeypatch):
    monkeypatch.setattr(tuning, "_last_words", lambda: "; the last one said: bash: /my: No such file or directory")
    waiting = [trial(Trial.PENDING)]
    watch.on_step_begin(1, waiting)
    clock.seconds = 59
    watch.on_step_begin(2, waiting)
    clock.seconds = 61
    with pytest.raises(
        RuntimeError, match=r"no trial has begun for 60 seconds.* the last one said: bash: /my: No such file"
    ):
        watch.on_step_begin(3, waiting)


def test_ray_that_was_started_by_hand_from_a_folder_with_a_space(watch, clock, monkeypatch):
    monkeypatch.setattr(tuning.sys, "executable", "/my course/python")
    waiting = [trial(Trial.PENDING)]
    watch.on_step_begin(1, waiting)
    clock.seconds = 61
    with pytest.raises(RuntimeError, match=r"no trial from '/my course/python': start it by tuning\.start_ray"):
        watch.on_step_begin(2, waiting)


@pytest.mark.parametrize(
    "config, scheduler, asks", [("loss", None, "tune.TuneConfig"), (None, "loss", "SimpleNamespace")]
)
def test_a_report_without_the_metric(watch, config, scheduler, asks):
    """Ray raises its own traceback as text, then cleans up."""
    wanted = {"_scheduler_alg": SimpleNamespace(metric=scheduler), "_search_alg": SimpleNamespace(metric=None)}
    with pytest.raises(ValueError, match=rf"report has no loss, by which {asks}.* goes: put it into each tune\.report"):
        try:
            TuneController._validate_result_metrics(SimpleNamespace(_metric=config, **wanted), {"los": 1.0, "round": 1})
        except ValueError:
            watch.on_experiment_end([])


def test_time_in_which_a_trial_runs_is_not_counted(watch, clock):
    clock.seconds = 59
    watch.on_step_begin(1, [trial(Trial.RUNNING)])
    clock.seconds = 110
    watch.on_step_begin(2, [trial(Trial.PENDING)])


def test_a_trial_that_says_nothing(watch, clock):
    running = trial(Trial.RUNNING)
    watch.on_step_begin(1, [running])
    clock.seconds = 90
    watch.on_trial_result(2, [running], running, {})
    clock.seconds = 180
    watch.on_step_begin(3, [running])
    clock.seconds = 191
    with pytest.raises(RuntimeError, match="no trial has reported for 100 seconds"):
        watch.on_step_begin(4, [running])


def test_nothing_left_to_do_is_no_waiting(watch, clock):
    clock.seconds = 1000
    watch.on_step_begin(1, [trial(Trial.TERMINATED)])


def test_a_tuner_can_write_it_to_a_file(watch):
    assert pickle.loads(pickle.dumps(watch)).bar is None


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupted_search_raises(clock, interrupted):
    """Ray's handler notes the interrupt and puts Python's back; fit() would return, with trials that never ran. Where none came,
    Ray leaves its own, which would take the next one from whatever runs then.
    """
    before = signal.getsignal(signal.SIGINT)
    watch = pickle.loads(pickle.dumps(tuning.Watch()))  # as Tuner.restore has it
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        watch.setup()
        if interrupted:
            signal.signal(signal.SIGINT, before)
        with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
            watch.on_experiment_end([trial(Trial.TERMINATED)])
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_diary_has_a_bar_for_each_trial_from_its_first_round_on(clock):
    """Ray says that a trial has started while its process still imports."""
    diary = tuning.Diary(rounds=4)
    one, other, silent = (SimpleNamespace(trial_id=name, last_result={}) for name in "abc")
    for each in (one, other, silent):
        diary.on_trial_start(1, [], each)
    for seconds, each, done, took in ((9, one, 1, 2), (11, one, 2, 2), (12, other, 1, 1), (20, other, 4, 2)):
        clock.seconds = seconds
        each.last_result = {"training_iteration": done, "time_this_iter_s": took, "pid": 70 + (each is other)}
        diary.on_trial_result(1, [], each, each.last_result)
        if done in (2, 4):
            diary.on_trial_complete(1, [], each)
    diary.on_trial_complete(1, [], silent)
    first = min(diary.begun.values())
    assert [(bar.process, bar.trial, bar.rounds, bar.stopped) for bar in diary.bars] == [
        (70, "a", 2, True),
        (71, "b", 4, False),
    ]
    assert [(bar.start + first, bar.end + first) for bar in diary.bars] == [(7, 11), (11, 20)]
    assert pickle.loads(pickle.dumps(diary)).bars == diary.bars, "a Tuner writes its callbacks to a file"
