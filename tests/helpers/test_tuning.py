"""Ray as notebook 05 uses it: started and ended without a trace, restored after a kill; the callbacks that say why a search does not go on."""

import contextlib
import errno
import os
import pickle
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial

import virtualgpu
from notebooks.scripts import tuning
from tests.processes import family, wait_until
from virtualgpu.run import inherit

ROOT = Path(__file__).resolve().parents[2]
MARK = "TUNING"  # a variable by which a program's processes are known

# A program of four trials, one after the other; each epoch that really ran leaves a digit. The third waits to be let go.
TRIALS = """
import os, psutil, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path
from notebooks.scripts import tuning
from tests.processes import listening

def slow(config, diary):
    for _ in range(40 * (config["n"] == 3)):
        print("x" * 999_999)
    for epoch in range(3):
        with open(Path(diary) / str(config["n"]), "a") as file:
            file.write(str(epoch))
        while config["n"] > 1 and not (Path(diary).parent / "go").exists():
            time.sleep(0.05)
        tune.report({"loss": config["n"], "python": sys.executable})
    from ray.air._internal.filelock import TempFileLock
    TempFileLock("x")  # as for a checkpoint: makes its folder

def stranger(gcs):
    # What somebody who finds Ray's sockets is told
    program = "import sys; from ray._raylet import GcsClient; print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    asked = subprocess.run([sys.executable, "-c", program, gcs], env=clean, capture_output=True, text=True)
    answers = set()
    for address, port in listening(psutil.Process(), "tcp4"):
        request = urllib.request.Request(f"http://{address}:{port}/get_or_create_runtime_env", b"", method="POST")
        try:
            answers.add(urllib.request.urlopen(request, timeout=20).status)
        except urllib.error.HTTPError as error:
            answers.add(error.code)  # 405: the autoscaler's counters, which are to be read alone
    places = {address.removeprefix("::ffff:") for address, port in listening(psutil.Process())}
    is_refused = "InvalidAuthToken" in asked.stderr and 401 in answers and answers <= {401, 405}
    return "refused" if is_refused and places == {"127.0.0.1"} else (asked, answers, places)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    there = tuning.start_ray(cpus=1)
    import ray
    from ray import tune
    if (folder / "go").exists():  # the second time
        print("stranger:", stranger(ray.get_runtime_context().gcs_address))
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
    same = all(trial.metrics["python"] == sys.executable for trial in results)
    logs = Path(os.environ["RAY_TMPDIR"]).rglob("worker-*.out*")
    kept = sum(path.stat().st_size for path in logs if not path.is_symlink())
    print("kept of 40 MB:", "some" if 10**6 < kept < 21 * 10**6 else kept)
    print("done", len(results), results.num_errors, there, len(ray.nodes()), same)
    tuning.stop_ray()
"""


def of_ray(driver: subprocess.Popen) -> list[Path]:
    """The folders with its Ray's files."""
    return [session.parent.parent for session in Path("/tmp").glob(f"virtualgpu-*/ray/session_*_{driver.pid}")]


def start(folder, python=sys.executable):
    """The program, in this folder, which is also the home folder."""
    (folder / "program.py").write_text(TRIALS)
    (folder / "temporary").mkdir(exist_ok=True)
    environment = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "TMPDIR": str(folder / "temporary"),
        MARK: uuid.uuid4().hex,
    }
    command = [str(python), str(folder / "program.py"), str(folder)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | environment}
    driver = subprocess.Popen(command, **options)
    driver.mark = environment[MARK]
    return driver


def epochs(folder):
    return {path.name: path.read_text() for path in sorted((folder / "diary").iterdir())}


def test_a_killed_experiment_goes_on(tmp_path):
    """The third trial has begun, and the experiment has noted so, when its driver is killed. All of it, the interpreter too, is in a
    folder with a space and Korean letters: Ray's line for bash broke at the space.
    """
    folder, python = tmp_path / "my 과정", sys.executable
    folder.mkdir()
    if sys.prefix != sys.base_prefix:  # a virtual environment can be linked to
        (folder / "venv").symlink_to(sys.prefix)
        python = folder / "venv" / "bin" / "python"
    driver = start(folder, python=python)
    third = folder / "diary" / "2"
    wait_until(third.exists, 100)
    notes = (folder / "run").glob
    wait_until(lambda: any(f.stat().st_mtime > third.stat().st_mtime for f in notes("experiment_state*.json")))
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert epochs(folder) == {"0": "012", "1": "012", "2": "0"}
    wait_until(lambda: not family(MARK, driver.mark))
    (left,) = of_ray(driver)
    os.utime(left, (0, 0))  # a young one may be somebody's who has not locked it yet

    (folder / "go").touch()
    again = start(folder, python=python)
    wait_until(lambda: of_ray(again), 60)
    (folder_of_ray,) = of_ray(again)
    assert stat.S_IMODE(folder_of_ray.stat().st_mode) == 0o700
    said, _ = again.communicate(timeout=150)
    assert "stranger: refused" in said and "kept of 40 MB: some" in said and "done 4 0 {'CPU': 1.0} 1 True" in said
    assert epochs(folder) == {"0": "012", "1": "012", "2": "0012", "3": "012"}  # nothing finished is repeated
    wait_until(lambda: not family(MARK, again.mark))
    assert not left.exists() and not of_ray(again) and not any((folder / "temporary").iterdir())
    assert not (folder / ".ray").exists() and not (folder / "ray_results").exists()  # in the home folder


# -- a start that fails


@pytest.fixture
def init(monkeypatch):
    """init(words): Ray's own start raises these, and notes each time the environment that it has."""
    import ray

    seen = []

    def fails(words):
        def start(**options):
            seen.append(dict(os.environ))
            raise RuntimeError(words)

        monkeypatch.setattr(ray, "init", start)
        return seen

    yield fails
    tuning.stop_ray()
    assert not any(name.startswith("RAY_TMPDIR") for name in os.environ)


def test_a_kernel_that_ends_ends_ray_first(monkeypatch):
    """A kernel's own way kills its child processes, for which Ray waits, until Jupyter kills the kernel with a traceback of Ray's."""
    import ray

    kernel = SimpleNamespace(do_shutdown=lambda restart: os.environ.get("RAY_TMPDIR"))
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    tuning.start_ray()
    assert os.environ["RAY_TMPDIR"] and kernel.do_shutdown(False) is None


@pytest.mark.parametrize("words, tries", [("The current node timed out during startup.", 2), ("something else", 1)])
def test_a_start_that_ray_found_too_slow_is_tried_again(init, words, tries):
    """From a cold disk Ray's processes may need more than the 30 s it gives them."""
    calls = init(words)
    with pytest.raises(RuntimeError, match=words):
        tuning.start_ray(cpus=1)
    assert len(calls) == tries


def test_a_full_disk_is_said(init, monkeypatch):
    """Ray's own words, where nothing can be written: it timed out waiting for a file."""
    init("Timed out waiting for file gcs_server_port")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="is full: free some space") as raised:
        tuning.start_ray(cpus=1)
    assert raised.value.errno == errno.ENOSPC and "gcs_server_port" in str(raised.value.__cause__)


def test_too_few_open_files_are_said_at_once(open_files_left):
    """Ray's own processes would end or wait, each for another."""
    open_files_left(20)
    with pytest.raises(OSError, match=r"Ray's processes need 128 more open files .* `ulimit -n 1024`"):
        tuning.start_ray(cpus=1)


def test_too_small_files_are_said_at_once():
    """Ray itself times out after half a minute, twice, and suspects an overload."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"need a file of 104,857,600 bytes, .* 8,388,608: .* `ulimit -f unlimited`"):
            tuning.start_ray(cpus=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_why_a_worker_does_not_start_is_told(monkeypatch, tmp_path):
    assert tuning._last_words() == ""
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("\n")
    (logs / "worker-1.err").write_text("ImportError: no such thing\n:task_name:answer\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert tuning._last_words() == "; the last one said: ImportError: no such thing"


def test_rays_processes_have_the_notebooks_gpus_and_this_one_its_environment(init):
    """What a program with these variables has is test_inherit's; that trials share a GPU's memory is an output of notebook 05."""
    virtualgpu.reset()
    with pytest.raises(ValueError, match=r"PyTorch sees 0 here; call virtualgpu.gpus\(2\) first"):
        tuning.start_ray(cpus=2, gpus=2)
    calls = init("seen")
    with virtualgpu.gpus(2, memory="1 GB"):
        given, before = inherit.variables(), dict(os.environ)
        with pytest.raises(RuntimeError, match="seen"):
            tuning.start_ray(cpus=2, gpus=2)
    tuning.stop_ray()
    (seen,) = calls
    assert "VIRTUALGPU" in given and given.items() <= seen.items()
    assert seen["RAY_AUTH_MODE"] == "token" and len(seen["RAY_AUTH_TOKEN"]) == 32
    assert dict(os.environ) == before and "VIRTUALGPU" not in before


@pytest.mark.parametrize("name", [name for name in vars(tuning._Private) if name.isupper()])
def test_what_is_private_in_ray_is_there(name):
    """With each of Ray's versions, or notebook 05 would wait, be open to strangers, or read an old token."""
    where, what = getattr(tuning._Private, name)
    assert hasattr(where, what)


# -- why a search does not go on. No Ray runs here: trials and cluster are stand-ins


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
    assert pickle.loads(pickle.dumps(watch)).bar is None, "a Tuner writes it to a file"
    return watch


def trial(status, **resources):
    factory = SimpleNamespace(required_resources={"CPU": 1.0, **resources})
    return SimpleNamespace(status=status, placement_group_factory=factory, is_finished=lambda: False)


RUNS, WAITS, LARGE = trial(Trial.RUNNING), trial(Trial.PENDING), trial(Trial.PENDING, GPU=8.0)
REPORT = "report"


@pytest.mark.parametrize("steps, error", [
    ([(0, LARGE)], "a trial asks for 8 GPU, and the cluster has 2: it would wait for ever"),
    ([(0, LARGE, WAITS)], None),
    ([(0, WAITS), (59, WAITS), (61, WAITS)], "no trial has begun for 60 seconds.* the last one said: bash: /my: No such file"),
    ([(59, RUNS), (110, WAITS)], None),  # time in which a trial runs is not counted
    ([(0, RUNS), (90, REPORT), (180, RUNS)], None),
    ([(0, RUNS), (90, REPORT), (191, RUNS)], "no trial has reported for 100 seconds"),
    ([(1000, trial(Trial.TERMINATED))], None),  # nothing left to do is no waiting
])  # fmt: skip
def test_why_a_search_does_not_go_on(watch, clock, monkeypatch, steps, error):
    monkeypatch.setattr(tuning, "_last_words", lambda: "; the last one said: bash: /my: No such file or directory")
    with pytest.raises((ValueError, RuntimeError), match=error) if error else contextlib.nullcontext():
        for number, (clock.seconds, *trials) in enumerate(steps):
            if trials == [REPORT]:
                watch.on_trial_result(number, [RUNS], RUNS, {})
            else:
                watch.on_step_begin(number, trials)


def test_a_cluster_of_which_nothing_is_left(watch, monkeypatch):
    """Its raylet was killed."""
    monkeypatch.setattr(tuning.ray, "cluster_resources", dict)
    with pytest.raises(ValueError, match=r"the cluster has 0: .*has a process of Ray's died\? start_ray\(\) starts it"):
        watch.on_step_begin(1, [WAITS])


def test_ray_that_was_started_by_hand_from_a_folder_with_a_space(watch, clock, monkeypatch):
    monkeypatch.setattr(tuning.sys, "executable", "/my course/python")
    watch.on_step_begin(1, [WAITS])
    clock.seconds = 61
    with pytest.raises(RuntimeError, match=r"no trial from '/my course/python': start it by tuning\.start_ray"):
        watch.on_step_begin(2, [WAITS])


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
    for clock.seconds, each, done, took in ((9, one, 1, 2), (11, one, 2, 2), (12, other, 1, 1), (20, other, 4, 2)):
        each.last_result = {"training_iteration": done, "time_this_iter_s": took, "pid": 70 + (each is other)}
        diary.on_trial_result(1, [], each, each.last_result)
        if done in (2, 4):
            diary.on_trial_complete(1, [], each)
    diary.on_trial_complete(1, [], silent)
    begun = min(diary.begun.values())
    found = [bar._replace(start=bar.start + begun, end=bar.end + begun) for bar in diary.bars]
    assert found == [(70, "a", 7, 11, 2, True), (71, "b", 11, 20, 4, False)]
    assert pickle.loads(pickle.dumps(diary)).bars == diary.bars, "a Tuner writes its callbacks to a file"
