"""The graders of notebook 05: tuning."""

import copy
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from checks.grader import grader


@grader
def frugal(scheduler) -> str | None:
    """A scheduler of Ray's, replayed on 100 searches: at most 60 % of the rounds, the best stopped in at most 8."""
    if isinstance(scheduler, type):
        return f"{scheduler.__name__} is a class: hand over an object of it, {scheduler.__name__}(...)"
    if not all(hasattr(scheduler, name) for name in ("on_trial_result", "choose_trial_to_run")):
        return f"{type(scheduler).__name__} is not a scheduler of Ray's: let its class inherit from FIFOScheduler"
    if complaint := _misread(scheduler):
        return complaint
    spent, lost = 0, 0
    for number in range(SEARCHES):
        losses = _crossing(random.Random(number))
        try:
            rounds = _replay(copy.deepcopy(scheduler), losses)
        except _NotPlayed as error:
            return (
                f"{type(scheduler).__name__} asks for {error}, which recorded losses have not: take a scheduler that stops trials by "
                "their losses alone, such as ASHAScheduler, HyperBandScheduler or MedianStoppingRule"
            )
        except _NoAnswer as error:
            return str(error)
        best = min(range(len(losses)), key=lambda trial: losses[trial][-1])
        spent, lost = spent + sum(rounds), lost + (rounds[best] < ROUNDS)
    share = 100 * spent / (SEARCHES * TRIALS * ROUNDS)
    summary = f"it spends {share:.0f} % of the rounds, and stops the best trial in {lost} of {SEARCHES} searches"
    if lost > 0.8 * SEARCHES:
        return f"{summary}: does it stop the trials of low loss, the good ones?"
    if share > 60:
        return f"{summary}; at most 60 % are allowed: stop more, or earlier"
    if lost > 8:
        return f"{summary}; at most 8 are allowed: where do the late bloomers overtake?"
    return None


@grader
def goes_on(trainable: Callable[[dict], None]) -> str | None:
    """Crashed once and started again, it works each round once."""
    draw = random.Random()
    numbers = {round: draw.randint(1, 1000) for round in range(1, 7)}
    with tempfile.TemporaryDirectory(prefix="work-") as folder:
        diary = Path(folder, "diary")
        # a checkpoint every second round, or third, has lost some by one of these
        work = _work(diary, numbers, breaks=draw.choice((2, 6)))
        results = _run(trainable, {"work": work})
        if isinstance(results, str):
            return results
        worked = [int(line) for line in diary.read_text("utf-8").split()] if diary.exists() else []
    if results.num_errors:
        return f"it ended with {str(results.errors[0]).strip().splitlines()[-1]}"
    for round in numbers:
        if (times := worked.count(round)) != 1:
            return f"round {round} was worked {times} times; it crashed once, and should then go on where it was"
    if (got := results[0].metrics.get("total")) != (right := sum(numbers.values())):
        return f"the last report says {got} in total; it should be {right}"
    if results[0].checkpoint is None:
        return "it got over the crash within its process, and left no checkpoint: a process that is killed starts from nothing"
    return None


ROUNDS, TRIALS, SEARCHES = 16, 20, 100
ANSWERS = ("CONTINUE", "PAUSE", "STOP", "NOOP")  # of Ray's TrialScheduler
TIMES = ("training_iteration", "time_total_s")  # what a scheduler may count by


def _misread(scheduler) -> str | None:
    """Does it look at something else than the trials' loss, or want it high?"""
    metric, mode, time = (getattr(scheduler, name, None) for name in ("_metric", "_mode", "_time_attr"))
    if metric not in (None, "loss"):
        return f"it looks at {metric!r}, and the trials report 'loss'"
    if mode not in (None, "min"):
        return f"its mode is {mode!r}, which stops the trials of low loss, the good ones: 'min' is the mode of a loss"
    if time not in (None, *TIMES):
        return f"it counts by {time!r}, and the trials report {' and '.join(TIMES)}"
    return None


class _NotPlayed(AttributeError):
    """A scheduler asks for what the stand-ins below do not have."""


class _NoAnswer(Exception):
    """A rule's answer says nothing."""


class _Stand:
    """In the place of something of Ray's."""

    def __getattr__(self, name: str):
        raise _NotPlayed(f"the {type(self).__name__.removeprefix('_').lower()}'s `{name}`")


class _Trial(_Stand):
    """What a scheduler sees of a trial."""

    is_saving = False

    def __init__(self, number: int, losses: list[float]):
        self.trial_id, self.status, self.losses = str(number), "PENDING", losses
        self.rounds = 0
        self.last_result: dict[str, float] = {}

    def work(self) -> None:
        """One round; it takes a second."""
        self.rounds += 1
        self.last_result = {"loss": self.losses[self.rounds - 1], **dict.fromkeys(TIMES, self.rounds)}


class _Controller(_Stand):
    """What it sees of Ray's controller, which runs four trials at a time. No process is started."""

    def __init__(self, scheduler, losses: list[list[float]]):
        self._scheduler, self._trials = scheduler, [_Trial(*numbered) for numbered in enumerate(losses)]
        for trial in self._trials:
            scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[_Trial]:
        return self._trials

    def get_live_trials(self) -> set[_Trial]:
        return {trial for trial in self._trials if trial.status != "TERMINATED"}

    def stop_trial(self, trial: _Trial) -> None:
        if trial.status == "RUNNING":
            self._scheduler.on_trial_complete(self, trial, trial.last_result)
        elif trial.status != "TERMINATED":
            self._scheduler.on_trial_remove(self, trial)
        trial.status = "TERMINATED"

    def run(self) -> list[int]:
        """The rounds of each trial, once none runs any more."""
        while running := self._running():
            for trial in running:
                if trial.status == "RUNNING":  # and was not stopped on account of another one
                    trial.work()
                    last = trial.rounds == ROUNDS
                    said = "STOP" if last else self._scheduler.on_trial_result(self, trial, trial.last_result)
                    if said not in ANSWERS:
                        raise _NoAnswer(
                            f"on_trial_result returned {said!r}; it answers TrialScheduler.CONTINUE or STOP"
                        )
                    if said == "STOP":
                        self.stop_trial(trial)
                    elif said == "PAUSE":
                        trial.status = "PAUSED"
        return [trial.rounds for trial in self._trials]

    def _running(self, workers: int = 4) -> list[_Trial]:
        running = [trial for trial in self._trials if trial.status == "RUNNING"]
        while len(running) < workers and (trial := self._scheduler.choose_trial_to_run(self)) is not None:
            trial.status = "RUNNING"
            running.append(trial)
        return running


def _crossing(draw: random.Random) -> list[list[float]]:
    """Losses of 20 learning rates: the higher a rate, the sooner its loss falls, and above the best the higher it ends."""
    centre, losses = draw.uniform(-3, -1), []
    for _ in range(TRIALS):
        above = draw.uniform(-4, 0) - centre  # powers of ten
        slow, end = 4 * 10**-above, min(2.3, 0.3 + (1.6 * above if above > 0 else -0.1 * above))
        losses.append([end + (2.3 - end) * math.exp(-r / slow) + draw.gauss(0, 0.02) for r in range(1, ROUNDS + 1)])
    return losses


def _replay(scheduler, losses: list[list[float]]) -> list[int]:
    """How many rounds of each trial a scheduler lets run. What it draws (ASHA's brackets) is the same each time."""
    has = {name: getattr(scheduler, f"_{name}", None) for name in ("metric", "mode")}
    scheduler.set_search_properties(None if has["metric"] else "loss", None if has["mode"] else "min")
    state = np.random.get_state()
    np.random.seed(0)
    try:
        return _Controller(scheduler, losses).run()
    finally:
        np.random.set_state(state)


# What goes to a trial's process is a function in a function: it travels whole, and nothing of ours, which brings PyTorch, is imported.


def _work(diary: Path, numbers: dict[int, int], breaks: int) -> Callable[[int], int]:
    """What a round has to do: leaves its number in the diary, breaks once, and ends a loop that does not end."""

    def work(round: int) -> int:
        broken = diary.with_name("broken")
        if round == breaks and not broken.exists():
            broken.touch()
            raise RuntimeError("the grader's crash")
        with open(diary, "a", encoding="utf-8") as file:
            file.write(f"{round}\n")
        if diary.stat().st_size > 1000:
            raise RuntimeError("hundreds of rounds: does the loop end?")
        return numbers[round]

    return work


def _run(trainable: Callable, space: Mapping):
    """The results of one trial, which may fail once; or what is to be done first."""
    import ray  # takes seconds: only those who are graded here wait for it
    from ray import tune

    if not ray.is_initialized():
        return "Ray does not run: start_ray(cpus=2) of notebooks/scripts/tuning.py starts it"
    from notebooks.scripts.tuning import Watch

    with tempfile.TemporaryDirectory(prefix="graded-") as folder:
        run_config = tune.RunConfig(
            storage_path=folder,
            verbose=0,
            callbacks=[Watch(silence=SILENCE)],
            progress_reporter=tune.CLIReporter(),
            failure_config=tune.FailureConfig(max_failures=1),
        )
        # one trial at a time, in one process: sooner than two processes
        trainable = tune.with_resources(trainable, {"cpu": min(2, ray.cluster_resources().get("CPU", 1))})
        return tune.Tuner(trainable, param_space=dict(space), run_config=run_config).fit()


SILENCE = 20.0  # seconds without a report, after which a trial is taken not to end
