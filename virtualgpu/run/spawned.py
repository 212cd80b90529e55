"""Processes that multiprocessing spawns, `mp.spawn`'s ranks among them, forked from a Python of the program's own that has PyTorch loaded.

Each would import PyTorch, which is nearly all that a test of a small model on two ranks waits for. A spawned process finds what it would find
in a new Python: its parent above it, its environment, folder, streams and random numbers, and PyTorch not yet imported. On Linux, where a
process can adopt its grandchildren; and where anything that a library may have read differs, a new Python it is.
"""

import array
import contextlib
import ctypes
import fcntl
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from types import CodeType

from virtualgpu import environment
from virtualgpu.run.process_tree import SUBREAPER

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CODE = f"""
import sys
sys.path.insert(0, {os.path.dirname(PACKAGE)!r})
from virtualgpu.run import spawned
del sys.path[0]
exec(spawned.serve(int(sys.argv[1])))
"""
WORD = "--multiprocessing-fork"  # multiprocessing's own, last in the command of each process that it spawns
OF_THE_RUNNER = (environment.VARIABLE, environment.PROFILED)
GET_SUBREAPER = 37  # linux/prctl.h, PR_GET_CHILD_SUBREAPER
# What programs set for their ranks, and nothing reads when PyTorch is imported
OF_RANKS = re.compile(
    "MASTER_(ADDR|PORT)|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|PYTEST_.*|CUDA_VISIBLE_DEVICES|NCCL_.*|GLOO_.*|"
    + "|".join(OF_THE_RUNNER)
)


class WarmPython:
    """The process, seen from the one that spawns. It starts with the first child."""

    def __init__(self):
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._began: tuple | None = None  # the circumstances

    def install(self) -> None:
        """From here on, in this process and those that are forked from it, each with a warm Python of its own."""
        plainly = util.spawnv_passfds
        util.spawnv_passfds = lambda path, args, passfds: self.start(plainly, path, args, passfds)
        os.register_at_fork(after_in_child=self.__init__)  # type: ignore[misc]

    def start(self, plainly: Callable[..., int], path, args: Sequence, fds: Sequence[int]) -> int:
        """multiprocessing.util.spawnv_passfds: the number of the new process, a child of this one."""
        if args[-1] == WORD and os.fsdecode(path) == sys.executable:
            with self._lock:
                pid = self._fork(args, fds)
            if pid is not None:
                return pid
        return plainly(path, args, fds)

    def _fork(self, args: Sequence, fds: Sequence[int]) -> int | None:
        now = _circumstances(args)
        if self._began is None:
            self._began = now
            self._begin(args)
        if self._socket is None or now != self._began:
            return None
        numbers = sorted({0, 1, 2, *map(int, fds)})
        message = pickle.dumps((dict(os.environ), os.getcwd(), args[-2], numbers))
        before, prctl = ctypes.c_int(), ctypes.CDLL(None).prctl
        prctl(GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))])
            pid = int(self._socket.recv(32))
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is not our child
            return pid
        except (OSError, ValueError):  # it has gone, or these are too many words, or numbers of closed files
            self._end()
            return None
        except BaseException:  # Ctrl-C: its answer must not be taken for the next child's
            self._end()
            raise
        finally:
            prctl(SUBREAPER, before.value, 0, 0, 0)

    def _begin(self, args: Sequence) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in OF_THE_RUNNER}
        with contextlib.suppress(OSError):  # no process more: multiprocessing's own start will say so
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                process = subprocess.Popen(
                    [sys.executable, *args[1:-3], "-c", CODE, str(other.fileno())],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                )
                process.returncode = 0  # nobody waits for it: it ends when this process does

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _circumstances(args: Sequence) -> tuple:
    """What a process has from its parent, and may not be changed in one that has imported PyTorch."""
    return _common(os.environ), args[1:-3], os.sched_getaffinity(0), os.getpgrp(), os.getuid()


def _common(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not OF_RANKS.fullmatch(name)}


def serve(number: int) -> CodeType:
    """Until the other end of the socket closes. Returns in each child, with the code that multiprocessing has for it."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; the parent decides
    from virtualgpu.run.trials import forked

    forked.load()
    import virtualgpu.run.child
    import virtualgpu.session  # noqa: F401

    requests = socket.socket(fileno=number)
    while True:
        message, rights, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 256))
        if not message:
            os._exit(0)
        files = array.array("i", rights[0][2])
        told, telling = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(telling, b"%d" % pid)
                os._exit(0)  # and whoever asked adopts it
            for end in (requests.detach(), told, telling):
                os.close(end)
            signal.signal(signal.SIGINT, interrupt)
            return _become(message, files)
        for end in (telling, *files):
            os.close(end)
        os.waitpid(between, 0)
        requests.send(os.read(told, 32))
        os.close(told)


def _become(asked: bytes, files: Sequence[int]) -> CodeType:
    """A Python that has just started: these are its open files, by the numbers that its parent knows them by."""
    from virtualgpu.run.trials import forked

    environ, folder, code, numbers = pickle.loads(asked)
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, wanted in zip(aside, numbers, strict=True):
        os.dup2(file, wanted)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1) and not sys.stdout.write_through)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv[:] = ["-c", WORD]
    forked.draw_own_numbers()
    forked.as_if_not_imported("torch", "virtualgpu")
    return compile(code, "<string>", "exec")
