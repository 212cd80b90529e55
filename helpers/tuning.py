"""Ray, started quietly and ended without a trace: what notebook 05 needs beside Ray Tune itself."""

import atexit
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

# No usage report, no token file in the home folder, GPUs left visible to trials that use none, the plain reporters
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",  # a killed experiment loses no more; Ray's own choice is 10 s and more
}
# Ray's sockets stand below it, and a socket's path may have 103 characters: macOS's own temporary folder is too long
SHORT = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
OBJECT_STORE = 100 << 20  # bytes of shared memory; Ray's default is a third of the machine's
_folder: str | None = None
_watcher: subprocess.Popen | None = None
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


def start_ray(address: str | None = None, cpus: int | None = None) -> dict[str, float]:
    """Start Ray here, or join the cluster at `address` ("10.0.0.1:6379"); what there is to use: {"CPU": 2.0, ...}.

    Ray's files go to a folder that stop_ray() removes, or where a notebook was killed, the next start. Calling it again
    starts afresh. Raises ConnectionError where no cluster answers at `address`.
    """
    global _folder, _watcher
    stop_ray()
    _remove_folders_of_the_dead()
    os.environ.update(QUIET)
    if address is not None:
        _knock(address)  # ray.init would end this whole process where nobody answers
    import ray

    options = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        _folder = tempfile.mkdtemp(prefix=f"ray-{os.getpid()}-", dir=SHORT)
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        options |= {"num_cpus": cpus, "_temp_dir": _folder}
        command = [sys.executable, "-c", WATCH, str(os.getpid())]
        # in a session of its own: an interrupted cell must not interrupt it
        _watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray gives its processes 30 s: from a cold disk too little, and enough the second time
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        ray.init(address=address, **options)
    # a trial's error is in its result; not its traceback here, too
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    atexit.register(stop_ray)
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
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        cure = "start one with `ray start --head --port=6379`, and give its address as host:port"
        raise ConnectionError(f"no Ray cluster answers at {address!r} ({error}): {cure}") from None


def _remove_folders_of_the_dead() -> None:
    for folder in Path(SHORT).glob("ray-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
