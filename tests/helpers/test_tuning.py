"""Ray as notebook 05 uses it: started and ended without a trace, restored after a kill."""

import errno
import os
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def start(folder, *arguments, python=sys.executable):
    """The program, in this folder, which is also the home folder."""
    (folder / "program.py").write_text(TRIALS)
    mark = uuid.uuid4().hex
    (folder / "temporary").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder), MARK: mark}
    environment["TMPDIR"] = str(folder / "temporary")
    command = [str(python), str(folder / "program.py"), str(folder), *arguments]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    driver.mark = mark
    return driver


def nobody_is_left(process) -> bool:
    return not family(MARK, process.mark)


def epochs(folder):
    return {path.name: path.read_text() for path in sorted((folder / "diary").iterdir())}


def test_importing_ray_builds_no_grammar():
    """jsonschema from 4.25 on builds one where JupyterLab is installed: two seconds for each process that Ray starts."""
    program = "import ray, sys; print(*(name for name in sys.modules if name.startswith('rfc3987')))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


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
    wait_until(lambda: nobody_is_left(driver))
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
    wait_until(lambda: nobody_is_left(again))
    assert not left.exists() and not of_ray(again) and not any((folder / "temporary").iterdir())
    assert not (folder / ".ray").exists() and not (folder / "ray_results").exists()  # in the home folder


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


def test_a_full_disk_is_said(monkeypatch):
    """Ray's own words, where nothing can be written: it timed out waiting for a file."""
    import ray

    def init(**options):
        raise RuntimeError("Timed out waiting for file gcs_server_port")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="is full: free some space") as raised:
        tuning.start_ray(cpus=1)
    assert raised.value.errno == errno.ENOSPC and "gcs_server_port" in str(raised.value.__cause__)
    assert not any(name.startswith("RAY_TMPDIR") for name in os.environ)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such limit")
def test_too_few_open_files_are_said_at_once():
    """Ray's own processes would end or wait, each for another."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number + 20, hard))
    try:
        with pytest.raises(OSError, match=r"Ray's processes need 128 more open files .* `ulimit -n 1024`"):
            tuning.start_ray(cpus=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such limit")
def test_too_small_files_are_said_at_once():
    """Ray itself times out after half a minute, twice, and suspects an overload."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"need a file of 104,857,600 bytes, .* 8,388,608: .* `ulimit -f unlimited`"):
            tuning.start_ray(cpus=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_not_started_can_be_stopped():
    before = dict(os.environ)
    tuning.stop_ray()
    tuning.stop_ray()
    assert dict(os.environ) == before


def test_why_a_worker_does_not_start_is_told(monkeypatch, tmp_path):
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("\n")
    (logs / "worker-1.err").write_text("ImportError: no such thing\n:task_name:answer\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert tuning._last_words() == "; the last one said: ImportError: no such thing"
    monkeypatch.delenv("RAY_TMPDIR")
    assert tuning._last_words() == ""


def test_rays_processes_have_the_notebooks_gpus_and_this_one_its_environment(monkeypatch):
    """What a program with these variables has is test_inherit's; that trials share a GPU's memory is an output of notebook 05."""
    import ray

    seen = {}

    def init(**options):
        seen.update(os.environ)
        raise RuntimeError("seen")

    virtualgpu.reset()
    with pytest.raises(ValueError, match=r"PyTorch sees 0 here; call virtualgpu.gpus\(2\) first"):
        tuning.start_ray(cpus=2, gpus=2)
    monkeypatch.setattr(ray, "init", init)
    with virtualgpu.gpus(2, memory="1 GB"):
        given, before = inherit.variables(), dict(os.environ)
        with pytest.raises(RuntimeError, match="seen"):
            tuning.start_ray(cpus=2, gpus=2)
    tuning.stop_ray()
    assert "VIRTUALGPU" in given and given.items() <= seen.items()
    assert seen["RAY_AUTH_MODE"] == "token" and len(seen["RAY_AUTH_TOKEN"]) == 32
    assert dict(os.environ) == before and "VIRTUALGPU" not in before


@pytest.mark.parametrize("name", [name for name in vars(tuning._Private) if name.isupper()])
def test_what_is_private_in_ray_is_there(name):
    """With each of Ray's versions, or notebook 05 would wait, be open to strangers, or read an old token."""
    where, what = getattr(tuning._Private, name)
    assert hasattr(where, what)
