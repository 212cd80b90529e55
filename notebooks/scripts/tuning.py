"""Ray for notebook 05: started quietly, ended without a trace; and a word where a search would wait for ever."""

import atexit
import contextlib
import errno
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, NoReturn
from unittest import mock

import torch

from helpers.cells import progress
from virtualgpu import scratch
from virtualgpu.run import inherit
from virtualgpu.run.ranks import forkserver

# No usage report, GPUs left visible to trials that use none, the plain reporters
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CLIENT_MODE": "0",  # importing Ray sets it
    "TUNE_GLOBAL_CHECKPOINT_S": "1",  # a killed experiment loses no more; Ray's own choice is 10 s and more
    "RAY_ROTATION_MAX_BYTES": "10000000",  # of what a trial prints, and as much before; Ray's own choice is 512 MiB, and five
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "5",  # a trial that does not end is killed then; Ray's own choice is 600 s
}
# Who has no token is refused (from Ray 2.52 on), the machine's other users, too; in the environment, not in a file
PRIVATE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
LIMIT = 60  # seconds in which a trial has to begin where there is room: starting a worker takes some five
# Ray's sockets stand below it, and a socket's path may have 103 characters: macOS's own temporary folder is too long
SHORT = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
MEBIBYTE = 1 << 20
OBJECT_STORE = 100 << 20  # bytes of shared memory; Ray's default is a third of the machine's
# Two of Ray's agents outlive a killed notebook by minutes. This process sees its stdin close, and ends what was Ray's.
WATCH = """
import contextlib, psutil, select, sys
notebook, seen = psutil.Process(int(sys.argv[1])), set()
while not select.select([sys.stdin], [], [], 1)[0]:
    with contextlib.suppress(psutil.Error):
        seen.update(notebook.children(recursive=True))
for process in seen - {psutil.Process()}:
    with contextlib.suppress(psutil.Error):  # most have ended
        if "ray" in process.name() or "/ray/" in " ".join(process.cmdline()):
            process.kill()
"""


@contextlib.contextmanager
def _environment(variables: dict[str, str]):
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


with _environment(QUIET):
    import ray
    import ray._private.ray_constants
    import ray._private.worker
    import ray._raylet
    from ray import tune
    from ray.tune.experiment import Trial


class _Private:
    """Of Ray's private names those that have no public counterpart, each (where it is, its name): test_tuning.py asks for each."""

    CLUSTER = ray._private.ray_constants, "ENABLE_RAY_CLUSTER"  # read once, at import: do other machines join?
    DEATHS = ray._private.worker, "_worker_logs_enabled"  # what is said of a node that died, which no option turns off
    TOKEN = ray._raylet, "AuthenticationTokenLoader"  # remembers the token of an earlier start ...
    FORGET = ray._raylet.AuthenticationTokenLoader, "reset_cache"  # ... until it is told
    CONFIG = ray._raylet, "Config"  # has read the RAY_... variables at import, and reads them again by initialize("")


_started = contextlib.ExitStack()  # what stop_ray() undoes


def start_ray(cpus: int | None = None, gpus: int | None = None, nodes: bool = False) -> dict[str, float]:
    """Start Ray afresh; what there is to use: {"CPU": 2.0, ...}. stop_ray(), or the next start after a kill, removes its files.

    gpus: so many for trials, the notebook's virtual ones (call virtualgpu.gpus first) or this machine's. Trials share the memory
    of virtual GPUs with each other and with the notebook, as processes do on real ones. nodes: others may join (`ray start`); then
    Ray listens on every network of this machine, and answers who has its token.

    Raises ValueError where the GPUs are not there, OSError where too few files may be open, or too small ones
    written, or the disk is full.
    """
    stop_ray()
    if gpus and (there := torch.cuda.device_count()) < gpus:
        raise ValueError(f"start_ray(gpus={gpus}): PyTorch sees {there} here; call virtualgpu.gpus({gpus}) first")
    forkserver.require_files(
        forkserver.OPEN_FILES, "Ray's processes"
    )  # where one ends for want of them, others wait for it
    forkserver.require_file_size(OBJECT_STORE, "Ray's shared objects")
    atexit.register(stop_ray)
    _started.callback(atexit.unregister, stop_ray)
    _started.callback(_read_environment)
    folder = scratch.folder(SHORT)  # below it is Ray's own, which Ray opens to all: nobody comes through ours
    alone = {} if nodes else {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    _started.enter_context(_environment(QUIET | PRIVATE | alone | {"RAY_TMPDIR": folder}))
    _started.callback(scratch.remove, folder)
    # what Ray has read from there when it was imported
    _started.enter_context(mock.patch.object(*_Private.CLUSTER, nodes))
    _read_environment()
    # in a session of its own: an interrupted cell must not interrupt it
    command = [sys.executable, "-c", WATCH, str(os.getpid())]
    _started.callback(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True).communicate)
    _started.callback(ray.shutdown)
    kernel = getattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel", None)
    if kernel is not None:  # it ends its child processes before its own end comes: Ray would miss them, and wait
        end = kernel.do_shutdown
        _started.enter_context(mock.patch.object(kernel, "do_shutdown", lambda restart: stop_ray() or end(restart)))
    options = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    options |= {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": OBJECT_STORE}
    if (quoted := shlex.quote(sys.executable)) != sys.executable:
        # Ray puts the interpreter's path into a line for bash as it stands: a folder such as "my course" ends it
        options["runtime_env"] = {"py_executable": quoted}
    with _environment(inherit.variables() if gpus else {}):  # Ray's processes, and all they start, have it from here
        for again in (True, False):
            try:
                ray.init(**options)
                break
            except Exception as error:  # 30 s: from a cold disk too little, and enough the second time
                if not again or "timed out during startup" not in str(error):
                    _with_its_cause(error)
                ray.shutdown()
    setattr(*_Private.DEATHS, False)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a trial's error is in its result
    return {name: count for name, count in sorted(ray.cluster_resources().items()) if name in ("CPU", "GPU")}


def _with_its_cause(error: Exception) -> NoReturn:
    """On a full disk Ray's processes write nothing, and Ray says that it timed out waiting for a file."""
    full = shutil.disk_usage(SHORT).free < MEBIBYTE
    stop_ray()
    if full:
        raise OSError(
            errno.ENOSPC, f"Ray did not start, for {SHORT} is full: free some space, then try again"
        ) from error
    raise error


def stop_ray() -> None:
    """End Ray's processes and remove its files. Does nothing where Ray was not started."""
    _started.close()


def _read_environment() -> None:
    """Ray does so when it is imported, and remembers."""
    getattr(*_Private.FORGET)(getattr(*_Private.TOKEN).instance())
    getattr(*_Private.CONFIG).initialize("")


class Watch(tune.Callback):
    """RunConfig(callbacks=[Watch()]): a bar that moves with every trial that ends.

    Raises ValueError where every trial that waits asks for more than the cluster has, RuntimeError where none has begun for a
    minute or none has reported for `silence` seconds, ValueError for a report without the metric, KeyboardInterrupt where the search was interrupted: Ray itself waits on, or
    returns from an interrupted search as from one that is done.
    """

    def __init__(self, silence: float = 10 * LIMIT):
        self.silence, self.running, self.bar = silence, False, None
        self.handler = self.rays = signal.getsignal(signal.SIGINT)

    def __reduce__(self):
        """A Tuner writes its callbacks to a file; a bar and handlers cannot be written."""
        return Watch, (self.silence,)

    def setup(self, **info) -> None:
        self.bar = progress(range(info.get("total_num_samples") or 1), "trials")
        self.since = time.monotonic()  # nothing has happened since
        self.rays = signal.getsignal(signal.SIGINT)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info) -> None:
        running = any(trial.status == Trial.RUNNING for trial in trials)
        if running != self.running:
            self.running, self.since = running, time.monotonic()
        waiting = [trial for trial in trials if trial.status == Trial.PENDING and not running]
        if waiting and all(lacks := [_lacking(trial) for trial in waiting]):
            raise ValueError(lacks[0])
        quiet = time.monotonic() - self.since
        if waiting and quiet > LIMIT:
            raise RuntimeError(
                f"no trial has begun for {LIMIT} seconds, although there is room{_unquoted()}{_last_words()}"
            )
        if running and quiet > self.silence:
            raise RuntimeError(f"no trial has reported for {self.silence:g} seconds: does one of them end?")

    def on_trial_result(self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info) -> None:
        self.since = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info) -> None:
        self.bar.n = 1 + sum(other.is_finished() for other in trials if other is not trial)
        self.bar.refresh()

    def on_experiment_end(self, trials: list[Trial], **info) -> None:
        self.bar.close()
        interrupted = signal.getsignal(signal.SIGINT) is not self.rays  # Ray's own gives way when it has been called
        if self.rays is not self.handler:
            signal.signal(signal.SIGINT, self.handler)  # else the first interrupt of what follows would be lost, too
        if interrupted:
            raise KeyboardInterrupt  # trials have been stopped by now, and the experiment's state is written
        # after an error Ray cleans up, and comes here: of this one its words are a traceback of its own
        lacks = re.search(r"specified metric\(s\) `(.+?)` that `(.+?)` expects", str(sys.exc_info()[1]))
        if lacks:
            raise ValueError(
                f"a trial's report has no {lacks[1]}, by which {lacks[2]} goes: put it into each tune.report({{...}})"
            ) from None


class Bar(NamedTuple):
    """A trial's time in a process, from its start to its end or to where it was stopped."""

    process: int
    trial: str
    start: float  # seconds since the first
    end: float
    rounds: int
    stopped: bool  # before its last round


class Diary(tune.Callback):
    """RunConfig(callbacks=[Diary()]): when each trial ran, in which process. `bars` has one for each that has ended."""

    def __init__(self, rounds: int = 16):
        self.rounds, self.begun, self.bars = rounds, {}, []

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info) -> None:
        self.begun[trial.trial_id] = time.monotonic()

    def on_trial_result(self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info) -> None:
        done = result["training_iteration"]
        if done == 1:  # Ray starts a trial before its process has imported what it needs
            self.begun[trial.trial_id] = time.monotonic() - result["time_this_iter_s"]

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info) -> None:
        result, first = trial.last_result, min(self.begun.values())
        if done := result.get("training_iteration", 0):  # else it ended without a report
            start, end = self.begun[trial.trial_id] - first, time.monotonic() - first
            self.bars.append(Bar(result["pid"], trial.trial_id, start, end, done, done < self.rounds))


def _lacking(trial: Trial) -> str:
    """What this trial asks for and nobody has; empty where there is enough."""
    there = ray.cluster_resources()
    for name, wanted in trial.placement_group_factory.required_resources.items():
        if wanted > there.get(name, 0):
            died = "" if there.get("CPU") else " (has a process of Ray's died? start_ray() starts it afresh)"
            return f"a trial asks for {wanted:g} {name}, and the cluster has {there.get(name, 0):g}: it would wait for ever{died}"
    return ""


def _unquoted() -> str:
    """Where Ray was started by hand, from a path that its launcher does not quote."""
    if not os.environ.get("RAY_TMPDIR") and " " in sys.executable:
        return f"; Ray itself starts no trial from {sys.executable!r}: start it by tuning.start_ray()"
    return ""


def _last_words() -> str:
    """What Ray's processes said last: the reason, where workers do not start. Ray begins lines of its own with a colon."""
    logs = Path(os.environ.get("RAY_TMPDIR", "/nowhere")) / "ray" / "session_latest" / "logs"
    for path in [*logs.glob("raylet.err"), *sorted(logs.glob("worker-*.err"))]:
        lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip() and line[0] != ":"]
        if lines:
            return f"; the last one said: {lines[-1]}"
    return ""
