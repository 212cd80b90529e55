"""What ranks are forked from, a process that has PyTorch loaded; and the sockets and folders that a launch opens."""

import contextlib
import errno
import multiprocessing
import multiprocessing.util
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from typing import Any

from virtualgpu import scratch
from virtualgpu.run import launcher

# -- What `launch` opens on this machine: sockets for this machine alone, and what it needs.

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LONG = 64  # bytes of a folder's path: ours and multiprocessing's names add 39
OPEN_FILES = 128  # that a process of Ray's (its raylet has 56 with two workers), or of a notebook, may come to
FILES, FILES_PER_RANK = 20, 6  # that a launch opens here: pipes, sentinels, the store and its connections


def for_sockets() -> None:
    """multiprocessing's sockets, and those of its children, stand below a folder of ours: who is killed leaves it to the next. A socket's
    path ends after some 100 bytes (unix(7)), and a Korean letter is three of them: where TMPDIR is long, the folder is in /tmp.
    """
    config = vars(multiprocessing.current_process())["_config"]
    if config.get("tempdir") is None:
        is_long = len(os.fsencode(tempfile.gettempdir())) > LONG and os.access("/tmp", os.W_OK)
        config["tempdir"] = path = scratch.folder("/tmp" if is_long else None)
        util.Finalize(None, scratch.remove, (path,), exitpriority=-100)


def interface() -> str | None:
    """Where gloo's sockets listen: for this machine alone, or where the reader has said."""
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen and os.name == "posix" and (unknown := set(chosen.split(",")) - set(interfaces)):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={chosen}: this machine has no network interface {sorted(unknown)[0]!r}; "
            f"unset the variable, or name one of {', '.join(interfaces)}"
        )
    return chosen or next((name for name in interfaces if re.fullmatch(r"lo\d*", name)), None)


def store(nprocs: int):
    """On a port that is free, and for this machine alone: left to itself, it would listen on every network."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    with without_warnings():
        return dist.TCPStore(
            "127.0.0.1", port, nprocs, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """What C++ logs is dropped: without a network it says that no DNS server knows the name of an address."""
    try:
        kept = os.dup(2)
    except OSError:  # a closed one
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def require_files(number: int, what: str) -> None:
    """OSError where this process may not open so many files more: half-way, others would wait or say something else. what: needs them."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE, f"{what} need {number} more open files than there are: {launcher.MORE_FILES}"
        ) from None
    finally:
        for opened_file in opened:
            os.close(opened_file)


def require_file_size(nbytes: int, what: str) -> None:
    """OSError where no process started from here may write a file of so many bytes. what: needs it."""
    if resource is None:
        return
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < nbytes:
        raise OSError(
            errno.EFBIG,
            f"{what} need a file of {nbytes:,} bytes, and this process may write {most:,}: raise its limit, by "
            "`ulimit -f unlimited` before it starts",
        )


@contextlib.contextmanager
def room_for_processes() -> Iterator[None]:
    """In this block: OSError, with the cure, where the system starts no process or thread more."""
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        if cure := launcher.cure(str(error)):
            raise OSError(errno.EAGAIN, f"ranks could not be started{cure}") from error
        raise


# -- What ranks are forked from: a process that has PyTorch loaded, outside the notebook's process group.
#
# ipykernel ends a kernel once nobody but the kernel is in its group, and multiprocessing's resource tracker, which comes with the forkserver,
# ignores what it is sent. The kernel would wait for both, until Jupyter kills it: its temporary folders would stay.


# Imported before any rank is forked: what each would import by itself takes half of the time until its function begins
PRELOADED = [
    "cloudpickle",
    "torch.distributed.pipelining",  # which brings PyTorch's compiler
    "virtualgpu.session",
    "virtualgpu.run.ranks",
    "virtualgpu.distributed.dtensor",
    "virtualgpu.distributed.parallel",
]


def context() -> Any:
    """multiprocessing's, for ranks. Where there is no fork (Windows), each starts anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    for_sockets()
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(PRELOADED)
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
