"""The graders of notebook 05: tuning."""

import copy
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import virtualgpu
from checks.grader import alone, grader


@grader
def frugal(scheduler) -> str | None:
    """A scheduler of Ray's, replayed on 100 searches: at most 60 % of the rounds, the best stopped in at most 8."""
    if not hasattr(scheduler, "on_trial_result"):
        return f"{type(scheduler).__name__} is not a scheduler of Ray's, such as ASHAScheduler(...)"
    spent, lost = 0, 0
    for number in range(SEARCHES):
        losses = _crossing(random.Random(number))
        rounds = _replay(copy.deepcopy(scheduler), losses)
        best = min(range(len(losses)), key=lambda trial: losses[trial][-1])
        spent, lost = spent + sum(rounds), lost + (rounds[best] < ROUNDS)
    share = 100 * spent / (SEARCHES * TRIALS * ROUNDS)
    summary = f"it spends {share:.0f} % of the rounds, and stops the best trial in {lost} of {SEARCHES} searches"
    if share > 60:
        return f"{summary}; at most 60 % are allowed: stop more, or earlier"
    if lost > 8:
        return f"{summary}; at most 8 are allowed: where do the late bloomers overtake?"
    return None


@grader
def tunes(search: Callable[[Callable, int], object], timeout: float = 120) -> str | None:
    """The network of the lowest validation loss, within a budget, on hidden test images of two sets of brightness."""
    return alone(_tunes, search, timeout=timeout)


def _tunes(search: Callable) -> str | None:
    virtualgpu.reset()  # the networks are on the CPU, and train three times as fast where no virtual GPU is on
    for words, scale in (("pale", 1 / 6), ("dark", 100.0)):
        reads, complaint = _searched(search, scale)
        if complaint:
            return f"on the {words} images {complaint}"
        if reads < WANTED:
            default, _ = _searched(lambda start, budget: start(0.01).train(budget), scale)
            return (
                f"on the {words} images your network reads {reads:.0f} % (measured) of the test images; lr=0.01 for the "
                f"whole budget reads {default:.0f} % (measured), and {WANTED} % are asked for"
            )
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
BUDGET, STEPS, WANTED = 200, 8, 80  # rounds for all networks together, steps in a round, % of the test images


class _Stand:
    """What a scheduler sees of a trial."""

    def __init__(self, number: int):
        self.trial_id = str(number)


def _crossing(draw: random.Random) -> list[list[float]]:
    """Losses of 20 learning rates: the higher a rate, the sooner its loss falls, and above the best the higher it ends."""
    centre, losses = draw.uniform(-3, -1), []
    for _ in range(TRIALS):
        above = draw.uniform(-4, 0) - centre  # powers of ten
        slow, end = 4 * 10**-above, min(2.3, 0.3 + (1.6 * above if above > 0 else -0.1 * above))
        losses.append([end + (2.3 - end) * math.exp(-r / slow) + draw.gauss(0, 0.02) for r in range(1, ROUNDS + 1)])
    return losses


def _replay(scheduler, losses: list[list[float]], workers: int = 4) -> list[int]:
    """How many rounds of each trial a scheduler lets run, four at a time. No process is started."""
    scheduler.set_search_properties("loss", "min")
    waiting, running, rounds = list(range(len(losses))), {}, [0] * len(losses)
    while waiting or running:
        while waiting and len(running) < workers:
            running[waiting[0]] = _Stand(waiting[0])
            scheduler.on_trial_add(None, running[waiting.pop(0)])
        for trial, stand in list(running.items()):
            rounds[trial] += 1
            result = {"training_iteration": rounds[trial], "loss": losses[trial][rounds[trial] - 1]}
            result["time_total_s"] = float(rounds[trial])
            if rounds[trial] == ROUNDS:
                scheduler.on_trial_complete(None, running.pop(trial), result)
            elif scheduler.on_trial_result(None, stand, result) != "CONTINUE":
                del running[trial]
    return rounds


class _Training:
    """A network of the reader's search; `spend` takes its rounds from the budget."""

    def __init__(self, lr: float, seed: int, train, valid, spend: Callable[[int], None]):
        torch.manual_seed(seed)
        hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.data, self.valid, self.spend, self.loss = train, valid, spend, None
        self.batches = torch.Generator().manual_seed(seed)

    def train(self, rounds: int) -> float:
        """Train on for so many rounds; the validation loss."""
        self.spend(rounds)
        images, labels = self.data
        for _ in range(STEPS * rounds):
            batch = torch.randint(len(images), (16,), generator=self.batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(images[batch]), labels[batch]).backward()
            self.optimizer.step()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.net(self.valid[0]), self.valid[1]).nan_to_num(10.0).item()
        self.loss = min(10.0, loss)
        return self.loss


def _searched(search: Callable, scale: float) -> tuple[float, str]:
    """Percent of the test images that the chosen network reads; a complaint where there is none."""
    from helpers import data

    images, labels = data.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order] * scale, labels[order]
    parts = [(images[part], labels[part]) for part in (slice(200), slice(200, 600), slice(600, None))]
    left, begun = BUDGET, []

    def spend(rounds: int) -> None:
        nonlocal left
        if not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"train({rounds!r}): rounds are whole numbers from 1 on")
        if rounds > left:
            raise ValueError(f"train({rounds}): of the budget of {BUDGET} rounds {left} are left")
        left -= rounds

    def start(lr: float) -> _Training:
        begun.append(_Training(lr, len(begun), *parts[:2], spend))
        return begun[-1]

    search(start, BUDGET)
    done = [training for training in begun if training.loss is not None]
    if not done:
        return 0.0, "no network was trained"
    chosen = min(done, key=lambda training: training.loss)
    with torch.no_grad():
        right = chosen.net(parts[2][0]).argmax(1) == parts[2][1]
    return 100 * right.float().mean().item(), ""


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
        return "Ray does not run: helpers.tuning.start_ray(cpus=2) starts it"
    from helpers.tuning import Watch

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
