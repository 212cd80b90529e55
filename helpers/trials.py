"""What stands beside a search by Ray Tune: a progress bar, and a word where Ray would wait for ever."""

import signal
import time

import ray
from ray import tune
from ray.tune.experiment import Trial

from helpers import tuning
from helpers.waiting import progress


class Watch(tune.Callback):
    """RunConfig(callbacks=[Watch()]): a bar that moves with every trial that ends.

    Raises ValueError where every trial that waits asks for more than the cluster has, RuntimeError where none has begun for
    `limit` seconds or none has reported for `silence` seconds, KeyboardInterrupt where the search was interrupted: Ray itself
    waits on, or returns from an interrupted search as from one that is done.
    """

    def __init__(self, limit: float = tuning.LIMIT, silence: float = 10 * tuning.LIMIT):
        self.limit, self.silence = limit, silence
        self.bar = None
        self.handler = self.rays = signal.getsignal(signal.SIGINT)

    def __getstate__(self) -> dict:
        """A Tuner writes its callbacks to a file; a bar and handlers cannot be written."""
        return {"limit": self.limit, "silence": self.silence}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def setup(self, **info) -> None:
        self.bar = progress(range(info.get("total_num_samples") or 1), "trials")
        self.begun = self.heard = time.monotonic()
        self.rays = signal.getsignal(signal.SIGINT)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info) -> None:
        now = time.monotonic()
        if any(trial.status == Trial.RUNNING for trial in trials):
            self.begun = now
            if now - self.heard > self.silence:
                raise RuntimeError(f"no trial has reported for {self.silence:g} seconds: does one of them end?")
            return
        self.heard = now
        waiting = [trial for trial in trials if trial.status == Trial.PENDING]
        lacks = [_lacking(trial) for trial in waiting]
        if lacks and all(lacks):
            raise ValueError(lacks[0])
        if waiting and now - self.begun > self.limit:
            words = tuning.last_words()
            said = f" Ray's processes said last: {words}" if words else ""
            raise RuntimeError(f"no trial has begun for {self.limit:g} seconds, although there is room for one.{said}")

    def on_trial_result(self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info) -> None:
        self.heard = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info) -> None:
        if hasattr(self.bar, "refresh"):
            self.bar.n = 1 + sum(other.is_finished() for other in trials if other is not trial)
            self.bar.refresh()

    def on_experiment_end(self, trials: list[Trial], **info) -> None:
        if hasattr(self.bar, "close"):
            self.bar.close()
        interrupted = signal.getsignal(signal.SIGINT) is not self.rays  # Ray's own gives way when it has been called
        if self.rays is not self.handler:
            signal.signal(signal.SIGINT, self.handler)  # else the first interrupt of what follows would be lost, too
        if interrupted:
            raise KeyboardInterrupt  # trials have been stopped by now, and the experiment's state is written


def _lacking(trial: Trial) -> str:
    """What this trial asks for and nobody has; empty where there is enough."""
    there = ray.cluster_resources()
    for name, wanted in trial.placement_group_factory.required_resources.items():
        if wanted > there.get(name, 0):
            return f"a trial asks for {wanted:g} {name}, and the cluster has {there.get(name, 0):g}: it would wait for ever"
    return ""
