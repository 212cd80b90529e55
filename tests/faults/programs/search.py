"""A search by Ray Tune, which goes on from where an earlier one was killed."""

import sys
import time
from pathlib import Path

from notebooks.scripts import tuning


def trial(config):
    for epoch in range(3):
        time.sleep(0.2)
        tune.report({"loss": config["n"] + epoch})


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    tuning.start_ray(cpus=2)
    from ray import tune

    if tune.Tuner.can_restore(str(folder / "run")):
        tuner = tune.Tuner.restore(str(folder / "run"), trial, restart_errored=True)
    else:
        quiet = {"verbose": 0, "progress_reporter": tune.CLIReporter(), "callbacks": [tuning.Watch(silence=40)]}
        run = tune.RunConfig(name="run", storage_path=str(folder), **quiet)
        tuner = tune.Tuner(trial, param_space={"n": tune.grid_search([1, 2, 3, 4])}, run_config=run)
    results = tuner.fit()
    for result in results:
        if result.error:
            raise result.error
    print(sorted(result.metrics["loss"] for result in results))
    tuning.stop_ray()
    print("done")
