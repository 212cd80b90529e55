"""What ranks are forked from: a process that has PyTorch loaded, outside the notebook's process group.

ipykernel ends a kernel once nobody but the kernel is in its group, and multiprocessing's resource tracker, which comes with the forkserver,
ignores what it is sent. The kernel would wait for both, until Jupyter kills it: its temporary folders would stay.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import subprocess
from typing import Any

from virtualgpu.run.ranks import places


def context() -> Any:
    """multiprocessing's, for ranks. Where there is no fork (Windows), each starts anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    places.for_sockets()
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["virtualgpu.run.ranks.warm"])
    return chosen


@contextlib.contextmanager
def in_a_group_of_its_own():
    """Around the start of the first rank, with which both processes start."""
    original = multiprocessing.util.spawnv_passfds

    def start(path, args, passfds) -> int:
        started = subprocess.Popen(args, executable=path, pass_fds=passfds, process_group=0)
        started.returncode = 0  # it is multiprocessing that waits for it
        return started.pid

    multiprocessing.util.spawnv_passfds = start
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = original
