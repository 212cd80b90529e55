"""Ray as notebook 05 uses it: started and ended without a trace, restored after a kill, on two nodes; and the graders."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import checks
from helpers import Timeline, plots, tuning
from helpers.timeline import Span

ROOT = Path(__file__).resolve().parent.parent

# A program of a few slow trials; each epoch that really ran leaves a line
TRIALS = """
import sys, time
from pathlib import Path
from helpers import tuning

def slow(config, diary):
    for epoch in range(3):
        with open(Path(diary) / str(config["n"]), "a") as file:
            file.write(str(epoch))
        time.sleep(0.8)
        tune.report({"loss": config["n"]})

if __name__ == "__main__":
    folder, address = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    there = tuning.start_ray(address, cpus=None if address else 1)
    import ray
    from ray import tune
    (folder / "diary").mkdir(exist_ok=True)
    trainable = tune.with_parameters(slow, diary=str(folder / "diary"))
    if (folder / "run" / "tuner.pkl").exists():
        tuner = tune.Tuner.restore(str(folder / "run"), trainable, restart_errored=True)
    else:
        config = tune.TuneConfig(metric="loss", mode="min", reuse_actors=True)
        space = {"n": tune.grid_search(list(range(4)))}
        tuner = tune.Tuner(trainable, param_space=space, tune_config=config,
                           run_config=tune.RunConfig(name="run", storage_path=str(folder), verbose=0))
    results = tuner.fit()
    print("done", len(results), results.num_errors, there, len(ray.nodes()))
    tuning.stop_ray()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(TRIALS))
    return path


def start(program, folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": "/tmp", "HOME": str(folder)}
    command = [sys.executable, str(program), str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def last_line(process):
    said, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return [line for line in said.splitlines() if line.startswith("done")][-1]


def rays() -> list[int]:
    """Ray's processes on this machine."""
    names = ("raylet", "gcs_server", "ray::")
    return [p.pid for p in psutil.process_iter(["name", "cmdline"]) if _is_ray(p.info, names)]


def _is_ray(info, names) -> bool:
    command = " ".join(info["cmdline"] or [])
    return info["name"].startswith(names) or "ray/_private/workers" in command or "raylet/raylet" in command


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.2)
    return true()


def epochs(folder):
    return {path.name: path.read_text() for path in sorted((folder / "diary").iterdir())}


def test_importing_ray_builds_no_grammar():
    """jsonschema from 4.25 on builds one where JupyterLab is installed: two seconds for each process that Ray starts."""
    program = "import ray, sys; print(*(name for name in sys.modules if name.startswith('rfc3987')))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_killed_experiment_is_restored_and_leaves_nothing_behind(program, tmp_path):
    before, shared = set(rays()), set(os.listdir("/dev/shm"))
    driver = start(program, tmp_path)
    assert wait_until(
        lambda: len(list((tmp_path / "diary").glob("*"))) >= 3 if (tmp_path / "diary").exists() else False, 100
    )
    time.sleep(1.6)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    finished = {name for name, said in epochs(tmp_path).items() if said == "012"}
    assert finished >= {"0", "1"} and len(finished) < 4
    assert wait_until(lambda: set(rays()) <= before), "Ray's processes end with the killed driver"
    left = list(Path("/tmp").glob(f"ray-{driver.pid}-*"))
    assert len(left) == 1

    assert last_line(start(program, tmp_path)).startswith("done 4 0")
    after = epochs(tmp_path)
    assert {name: after[name] for name in ("0", "1")} == {"0": "012", "1": "012"}  # not repeated
    assert all(said.endswith("012") for said in after.values())
    assert wait_until(lambda: set(rays()) <= before)
    assert not left[0].exists()
    assert set(os.listdir("/dev/shm")) <= shared
    assert not (tmp_path / ".ray").exists() and not (tmp_path / "ray_results").exists()  # in the home folder


def test_the_same_program_runs_on_two_nodes_by_address_alone(program, tmp_path):
    before = set(rays())
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | tuning.QUIET,
    )
    try:
        address = cluster.stdout.readline().strip()
        said = last_line(start(program, tmp_path, address))
        assert said == "done 4 0 {'CPU': 2.0} 2", said
    finally:
        cluster.communicate("", timeout=60)
    assert wait_until(lambda: set(rays()) <= before)


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "somewhere:x"])
def test_an_address_where_nobody_is_says_what_to_do(address):
    """ray.init itself would end the process."""
    with pytest.raises(ConnectionError, match="ray start --head"):
        tuning.start_ray(address)


@pytest.mark.parametrize("words, tries", [("The current node timed out during startup.", 2), ("something else", 1)])
def test_a_start_that_ray_found_too_slow_is_tried_again(monkeypatch, words, tries):
    """From a cold disk Ray's processes may need more than the 30 s it gives them."""
    import ray

    calls = []

    def init(**options):
        calls.append(options)
        raise RuntimeError(words)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RuntimeError, match=words):
        tuning.start_ray(cpus=1)
    assert len(calls) == tries
    tuning.stop_ray()


def test_stopping_what_was_not_started_does_nothing():
    tuning.stop_ray()
    tuning.stop_ray()


def test_trials_of_one_process_share_a_row():
    found = Timeline.of_workers([(7, 10.0, 11.0, False), (5, 10.5, 10.6, True), (7, 11.0, 12.0, True)])
    assert found.origin == "measured" and found.seconds == 2.0
    assert found.rows == {
        "worker 0": [Span(0.5, pytest.approx(0.6), "cut")],
        "worker 1": [Span(0.0, 1.0, "trial"), Span(1.0, 2.0, "cut")],
    }


def test_the_search_plot_has_a_panel_each_and_rings_the_best(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_show", lambda figure, title, origin: figures.append(figure))
    plots.search({"a": [(0.1, 8, 50), (1, 16, 70)], "b": [(0.5, 8, 90)]}, "title", "x", "y", "z")
    panels = figures[0].axes[:2]
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    assert [axes.texts[0].get_text() for axes in panels] == ["70", "90"]


def right_space():
    from ray import tune

    return {"lr": tune.loguniform(1e-4, 0.1), "batch_size": tune.choice([16, 32, 64]), "dropout": tune.uniform(0, 0.5)}


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda tune: {}, "[passed]"),
        (lambda tune: {"lr": tune.uniform(1e-4, 0.1)}, "lr: half of the draws are below 0.0"),
        (lambda tune: {"lr": tune.loguniform(1e-3, 1)}, "lr: 2,000 draws lie between"),
        (lambda tune: {"batch_size": tune.choice([16, 32])}, "batch_size: it draws [16, 32]"),
        (lambda tune: {"dropout": 0.5}, "each entry should be something of tune's"),
        (lambda tune: {"momentum": tune.uniform(0, 1)}, "it has ['batch_size', 'dropout', 'lr', 'momentum']"),
    ],
)
def test_search_space(capsys, change, complaint):
    from ray import tune

    checks.search_space(right_space() | change(tune))
    assert complaint in capsys.readouterr().out


def halving(n, max_t, factor):
    spent, reached, rung = 0, 0, 1
    while reached < max_t:
        rung = min(rung, max_t)
        spent, reached, rung, n = spent + n * (rung - reached), rung, rung * factor, max(1, n // factor)
    return spent


def smallest(n, max_t, budget):
    return next(factor for factor in range(2, 100) if halving(n, max_t, factor) <= budget)


@pytest.mark.parametrize(
    "grade, answer, complaint",
    [
        (checks.epochs_spent, lambda n, max_t, factor: n * max_t, "64 epochs; it should be 20"),
        (checks.epochs_spent, halving, "[passed]"),
        (checks.reduction_factor, lambda n, max_t, budget: 2, "factor 2 needs 36, and the budget is 34"),
        (checks.reduction_factor, lambda n, max_t, budget: 9, "factor 8 stays within 40 as well"),
        (checks.reduction_factor, smallest, "[passed]"),
    ],
)
def test_halving(capsys, grade, answer, complaint):
    grade(answer)
    assert complaint in capsys.readouterr().out
