"""Start Ray without messages and remove all of its files and processes: what notebook 05 needs beside Ray Tune."""

import atexit
import contextlib
import logging
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from virtualgpu import scratch
from virtualgpu.run import inherit

# No usage report, GPUs left visible to trials that use none, the plain reporters
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CLIENT_MODE": "0",  # importing Ray sets it
    "TUNE_GLOBAL_CHECKPOINT_S": "1",  # a killed experiment loses no more; Ray's own choice is 10 s and more
    "TUNE_FORCE_TRIAL_CLEANUP_S": "5",  # a trial that does not end is killed then; Ray's own choice is 600 s
}
# Ray listens on every network of this machine: who has no token is refused (from Ray 2.52 on), and may read the autoscaler's
# counters alone. In the environment, not in a file in the home folder
PRIVATE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
LIMIT = 60  # seconds in which the first worker has to answer: starting one takes some five
# Ray's sockets stand below it, and a socket's path may have 103 characters: macOS's own temporary folder is too long
SHORT = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
OBJECT_STORE = 100 << 20  # bytes of shared memory; Ray's default is a third of the machine's
_folder: str | None = None
_watcher: subprocess.Popen | None = None
_environment = contextlib.ExitStack()  # what puts it back as it was
# Two of Ray's agents outlive a killed notebook by minutes. This process sees its stdin close, and ends what was Ray's.
WATCH = """
import contextlib, psutil, select, sys
notebook, seen = psutil.Process(int(sys.argv[1])), set()
while not select.select([sys.stdin], [], [], 1)[0]:
    with contextlib.suppress(psutil.Error):
        for child in notebook.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
                if "ray" in child.name() or "/ray/" in " ".join(child.cmdline()):
                    seen.add(child)
seen.discard(psutil.Process())
for process in seen:
    with contextlib.suppress(psutil.Error):
        process.kill()
"""


def start_ray(address: str | None = None, cpus: int | None = None, gpus: int | None = None) -> dict[str, float]:
    """Start Ray here, or join the cluster at `address` ("10.0.0.1:6379"); what there is to use: {"CPU": 2.0, ...}.

    gpus: so many for trials, the notebook's virtual ones (call helpers.gpus first) or this machine's. Trials share the memory
    of virtual GPUs with each other and with the notebook, as processes do on real ones.

    Ray's files go to a folder that stop_ray() removes, or where a notebook was killed, the next start. Calling it again
    starts afresh. Raises ConnectionError where no cluster answers at `address`; ValueError where the GPUs are not there;
    RuntimeError where no worker process starts, with what it said.
    """
    global _folder, _watcher
    stop_ray()
    if gpus:
        _count(gpus)
    if address is not None:
        _require_listener(address)  # ray.init would end this whole process where nobody answers
    atexit.register(stop_ray)
    _folder = scratch.folder(SHORT)  # below it is Ray's own, which Ray opens to all: nobody comes through ours
    ours = QUIET | {"RAY_TMPDIR": _folder} | (PRIVATE if address is None else {})
    _environment.enter_context(_in_environment(ours))
    import ray

    _read_environment()
    options = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        options |= {"num_cpus": cpus, "num_gpus": gpus}
        command = [sys.executable, "-c", WATCH, str(os.getpid())]
        # in a session of its own: an interrupted cell must not interrupt it
        _watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    quoted = shlex.quote(sys.executable)
    if quoted != sys.executable and (address is None or address.rpartition(":")[0] in _own_addresses()):
        # Ray puts the interpreter's path into a line for bash as it stands: a folder such as "my course" ends it
        options["runtime_env"] = {"py_executable": quoted}
    with _in_environment(inherit.variables() if gpus else {}):  # Ray's processes, and all they start, have it from here
        try:
            ray.init(address=address, **options)
        except Exception as error:  # 30 s: from a cold disk too little, and enough the second time
            if "timed out during startup" not in str(error):
                stop_ray()
                raise
            ray.shutdown()
            ray.init(address=address, **options)
    ray._private.worker._worker_logs_enabled = False  # what Ray says of a node that died, which no option turns off
    # a trial's error is in its result; not its traceback here, too
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    _hear_a_worker(ray)
    return {name: count for name, count in sorted(ray.cluster_resources().items()) if name in ("CPU", "GPU")}


def stop_ray() -> None:
    """End Ray's processes and remove its files. Does nothing where Ray was not started."""
    global _folder, _watcher
    atexit.unregister(stop_ray)
    ray = sys.modules.get("ray")  # not imported for this: that takes seconds, and would be before QUIET is set
    if ray is not None and ray.is_initialized():
        ray.shutdown()
    if _watcher is not None:
        _watcher.communicate()
        _watcher = None
    if _folder is not None:
        scratch.remove(_folder)
        _folder = None
    _environment.close()
    if ray is not None:
        _read_environment()


def last_words() -> str:
    """What Ray's processes said last: the reason, where workers do not start. Empty where they said nothing."""
    folder = Path(_folder or "/nowhere") / "ray" / "session_latest" / "logs"
    for path in [folder / "raylet.err", *sorted(folder.glob("worker-*.err"))]:
        lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
        lines = [
            line for line in lines if line.strip() and not line.startswith(":")
        ]  # :task_name:... is Ray's own mark
        if lines:
            return lines[-1]
    return ""


def _read_environment() -> None:
    """Ray does so when it is imported, and remembers."""
    from ray._raylet import AuthenticationTokenLoader, Config

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def _hear_a_worker(ray) -> None:
    """Ray starts a process that failed again and again, and would have everybody wait for ever."""

    @ray.remote(num_cpus=0)
    def answer() -> bool:
        return True

    try:
        ray.get(answer.remote(), timeout=LIMIT)
    except ray.exceptions.GetTimeoutError:
        words = last_words()
        stop_ray()
        said = f"; the last one said: {words}" if words else ""
        raise RuntimeError(f"Ray runs, but no worker process of it answered within {LIMIT} seconds{said}") from None


def _count(gpus: int) -> None:
    import torch

    if (there := torch.cuda.device_count()) < gpus:
        raise ValueError(f"start_ray(gpus={gpus}): PyTorch sees {there} here; call helpers.gpus({gpus}) first")


@contextlib.contextmanager
def _in_environment(variables: dict[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _own_addresses() -> set[str]:
    return {address.address for addresses in psutil.net_if_addrs().values() for address in addresses} | {"localhost"}


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        cure = "start one with `ray start --head --port=6379`, and give its address as host:port"
        raise ConnectionError(f"no Ray cluster answers at {address!r} ({error}): {cure}") from None
