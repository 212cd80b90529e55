"""The graders of notebook 05: tuning."""

import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from checks.grader import grader


@grader
def search_space(space: Mapping) -> str | None:
    """lr log-uniform from 1e-4 to 0.1, batch_size one of 16, 32, 64, dropout uniform from 0 to 0.5; judged by drawing."""
    if not isinstance(space, Mapping) or set(space) != {"lr", "batch_size", "dropout"}:
        has = sorted(map(str, space)) if isinstance(space, Mapping) else space
        return f"it has {has}, and should have batch_size, dropout, lr"
    try:
        drawn = {name: sorted(domain.sample(size=DRAWS, random_state=0)) for name, domain in space.items()}
    except AttributeError:
        return "each entry should be something of tune's that can be drawn from, such as tune.uniform(0, 1)"
    complaint = _not_even("lr", drawn["lr"], 1e-4, 0.1, math.log10, lambda exponent: 10**exponent)
    complaint = complaint or _not_even("dropout", drawn["dropout"], 0, 0.5)
    if complaint:
        return complaint
    shares = {size: count / DRAWS for size, count in Counter(drawn["batch_size"]).items()}
    if set(shares) != {16, 32, 64}:
        return f"batch_size: it draws {list(shares)[:5]}"
    for size, share in shares.items():
        if abs(share - 1 / 3) > 0.05:
            return f"batch_size: {size} is {share:.0%} of the draws; it should be a third"
    return None


def _not_even(name: str, drawn: list[float], low: float, high: float, scale=float, unscale=float) -> str | None:
    """Where sorted draws are not spread evenly from low to high, on a scale."""
    if drawn[0] < low * (1 - 1e-9) or drawn[-1] > high * (1 + 1e-9):
        return f"{name}: 2,000 draws lie between {drawn[0]:.4f} and {drawn[-1]:.4f}, not {low} and {high}"
    for part, word in ((2, "half"), (4, "a quarter"), (4 / 3, "three quarters")):
        found, wanted = drawn[int(DRAWS / part)], unscale(scale(low) + (scale(high) - scale(low)) / part)
        if abs(scale(found) - scale(wanted)) > 0.05 * (scale(high) - scale(low)):
            return f"{name}: {word} of the draws are below {found:.4f}; it should be about {wanted:.4f}"
    for found, end in ((drawn[0], low), (drawn[-1], high)):
        if abs(scale(found) - scale(end)) > 0.01 * (scale(high) - scale(low)):
            return f"{name}: 2,000 draws come no nearer to {end} than {found:.5f}"
    return None


@grader
def frugal(search) -> str | None:
    """search: a tune.TuneConfig that tries 20 learning rates, spends at most three quarters of their rounds, and stops not the best of them."""
    centre = random.Random().uniform(-4, -1)
    space = {"lr": _tune().loguniform(1e-5, 1)}
    results = _run(_training(centre), space, replace(search, reuse_actors=True, time_budget_s=LIMIT))
    if isinstance(results, str):
        return results
    if silent := sum("training_iteration" not in (trial.metrics or {}) for trial in results):
        return f"{silent} of {len(results)} trials had not reported when {LIMIT} seconds were over"
    spent = [trial.metrics["training_iteration"] for trial in results]
    if len({trial.config["lr"] for trial in results}) < 20:
        return f"it tried {len(results)} learning rates; try at least 20"
    # by chance ASHA needs more than half now and then, where good ones come late; of 20 trials more than this in 1 of 500
    if sum(spent) > (budget := int(0.75 * ROUNDS * len(spent))):
        return f"{len(spent)} trials spent {sum(spent)} rounds, and the budget is {budget}"
    best = min(range(len(spent)), key=lambda trial: abs(math.log10(results[trial].config["lr"]) - centre))
    if spent[best] < ROUNDS:
        return f"the best of {len(spent)} learning rates was stopped after {spent[best]} of {ROUNDS} rounds"
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
        results = _run(trainable, {"work": work}, _tune().TuneConfig(), max_failures=1)
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


DRAWS = 2000
ROUNDS = 16
LIMIT = 120  # seconds for a search


# What goes to a trial's process is a function in a function: it travels whole, and nothing of ours, which brings PyTorch, is imported.


def _training(centre: float) -> Callable[[Mapping], None]:
    """Sixteen rounds; the nearer to the centre the learning rate's logarithm, the lower the loss, from the first round on."""

    def training(config: Mapping) -> None:
        from ray import tune

        distance = abs(math.log10(config["lr"]) - centre)
        for round in range(1, ROUNDS + 1):
            tune.report({"loss": distance + 1 / round})

    return training


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


def _run(trainable: Callable, space: Mapping, search, max_failures: int = 0):
    """The results, or what is to be done first."""
    import ray

    if not ray.is_initialized():
        return "Ray does not run: helpers.tuning.start_ray(cpus=2) starts it"
    from helpers.tuning import Watch

    tune = _tune()
    with tempfile.TemporaryDirectory(prefix="graded-") as folder:
        run_config = tune.RunConfig(
            storage_path=folder,
            verbose=0,
            callbacks=[Watch(silence=SILENCE)],
            progress_reporter=tune.CLIReporter(),
            failure_config=tune.FailureConfig(max_failures=max_failures),
        )
        cpus = min(
            2, ray.cluster_resources().get("CPU", 1)
        )  # one trial at a time, in one process: sooner than two processes
        trainable = tune.with_resources(trainable, {"cpu": cpus})
        return tune.Tuner(trainable, param_space=dict(space), tune_config=search, run_config=run_config).fit()


SILENCE = 20.0  # seconds without a report, after which a trial is taken not to end


def _tune():
    """Ray's import takes seconds: only those who are graded here wait for it."""
    from ray import tune

    return tune
