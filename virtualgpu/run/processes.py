"""The processes of a run: each signal reaches the program once, what `mp.spawn` starts is forked, and nothing is left at the end."""

import array
import contextlib
import ctypes
import fcntl
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from types import CodeType

from virtualgpu import environment

# -- Whatever a process started ends with it: its children, theirs, and daemons that left its process group.

SUBREAPER = 36  # linux/prctl.h, PR_SET_CHILD_SUBREAPER


def keep_tree() -> None:
    """Called by a process at its start, so that `kill_tree` finds all that it will start."""
    if hasattr(os, "setsid"):
        os.setsid()  # a process group of its own
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # a daemon whose parent ends becomes a child of this process


def kill_tree(pid: int) -> None:
    """End that process and all below it, also in sessions of their own. Where it has ended already: what is left of
    its group."""
    for _ in range(3):  # a process may start another one meanwhile
        below = _below(pid)
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not below:
            break
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(pid, signal.SIGKILL)


def end_tree(pid: int) -> None:
    """As `kill_tree`, for a program that starts another process for each that ends, as torchrun does: it is stopped first."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(signal, "SIGSTOP"):
            os.kill(pid, signal.SIGSTOP)
        kill_tree(pid)
        os.kill(pid, signal.SIGKILL)


def end_marked(words: str) -> None:
    """End all processes in whose environment these words stand, whoever their parent is by now; stopped first, so that none starts another.
    Only Linux tells an environment."""
    for number in (signal.SIGSTOP, signal.SIGKILL) * 2:
        for pid in _marked(os.fsencode(words)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _marked(words: bytes) -> list[int]:
    marked = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.exists("/proc/self/environ") else []):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # ended, or another user's
            if words in file.read():
                marked.append(int(name))
    return marked


def _below(pid: int) -> list[int]:
    """The living processes below this one; none on Windows, which has neither /proc nor ps."""
    parents: dict[int, int] = {}
    if os.path.exists("/proc/self/stat"):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # proc(5): state, parent; the name may hold anything
                if fields[0] != b"Z":
                    parents[int(name)] = int(fields[1])
    elif os.name == "posix":
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    process_tree = [pid]
    for member in process_tree:
        process_tree += [child for child, parent in parents.items() if parent == member]
    return process_tree[1:]


# -- Signals between a terminal, the runner and its program: each reaches the program exactly once.
#
# A terminal sends Ctrl-C to the whole process group, so the program has it already, and passing it on would interrupt it twice.
# `kill PID` sends a signal to the runner alone, which must pass it on. The two look alike to the receiver. So the runner keeps a
# second process in its group, the supervisor: what the supervisor hears as well was sent to the group.
#
# The supervisor also notices when the runner itself is killed (a pipe closes): then it kills the program, and what the program started
# (torchrun's ranks, and theirs), and removes its folder. Where all of the group is killed, and the supervisor with it, as at the restart
# of a notebook's kernel, torchrun's ranks are in groups of their own: a third process, which is in none of these, ends them.


PASSED_ON = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
# How long to wait for the supervisor's word. It has nothing else to do; a busy machine wakes it within some milliseconds.
GRACE = 0.2
_HEARD = struct.Struct("qd")  # which signal, and when by the monotonic clock


class Supervisor:
    """Started before the program. What was ignored when the runner started stays ignored (nohup)."""

    def __init__(self, folder: str):
        self._program: subprocess.Popen | None = None
        self._early: list[int] = []  # signals that came before there was a program
        self._words: list[tuple[int, float]] = []  # what the supervisor heard, and when
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until all of us are ready for them
        from_living, self._living = _pipe()  # which the runner alone holds open
        self._last = _forked(lambda: _outlive(from_living, self._living, folder))
        os.close(from_living)
        from_runner, self._to_supervisor = _pipe()
        self._heard, to_runner = _pipe()
        runners = (self._living, self._to_supervisor, self._heard)
        self.pid = _forked(lambda: _keep_watch(runners, from_runner, to_runner, folder, before))
        os.close(from_runner)
        os.close(to_runner)
        self._before = {}
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(
                    number, self._pass_on
                )  # a handler is the default again in the program
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, program: subprocess.Popen) -> int:
        """The program's status, as Popen gives it, once it has ended. It does not outlive an error here."""
        try:
            self._program = program
            with contextlib.suppress(BrokenPipeError):  # somebody killed the supervisor
                os.write(self._to_supervisor, b"%d" % program.pid)
            for number in self._early:  # sent to the group or to us: the program was not there to hear it
                program.send_signal(number)
            return program.wait()
        except BaseException:
            program.kill()
            program.wait()
            raise

    def dismiss(self) -> None:
        """Signals are again what they were before."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not of Python
        for pid in (self.pid, self._last):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _pass_on(self, number: int, frame) -> None:
        if self._program is None:
            self._early.append(number)
        elif not self._sent_to_group(number):
            self._program.send_signal(number)

    def _sent_to_group(self, number: int) -> bool:
        """Did the supervisor hear it too? Another signal's handler may run in the midst of this, and wait for its own word."""
        now = time.monotonic()
        until = now + GRACE
        while True:
            while select.select([self._heard], [], [], 0)[0]:
                heard = os.read(self._heard, _HEARD.size)
                if not heard:  # somebody killed the supervisor
                    return False
                self._words.append(_HEARD.unpack(heard))
            for word in self._words:
                if word[0] == number and now - word[1] < GRACE:  # not one of another time
                    self._words.remove(word)
                    return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            select.select([self._heard], [], [], min(left, GRACE / 10))


def _pipe() -> tuple[int, int]:
    """Its ends are none of 0, 1, 2: these may be closed (`<&-`), and the supervisor puts nothing in their place."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return read, write


def _forked(watch: Callable[[], None]) -> int:
    """The number of a new process that does this and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            watch()
        finally:
            os._exit(0)
    return pid


def _keep_watch(runners: Iterable[int], from_runner: int, to_runner: int, folder: str, mask: set[int]) -> None:
    for end in runners:
        os.close(end)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.write(to_runner, _HEARD.pack(number, time.monotonic())))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _let_go()
    program = os.read(from_runner, 32)
    os.read(from_runner, 1)  # returns when the runner is gone
    if program:
        end_tree(int(program))
    shutil.rmtree(folder, ignore_errors=True)


def _outlive(from_living: int, living: int, folder: str) -> None:
    os.close(living)
    os.setsid()
    _let_go()
    os.read(from_living, 1)  # returns when the runner is gone
    end_marked(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _let_go() -> None:
    """Of the runner's streams: whoever reads the program's output must not wait for us."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def end_as(status: int) -> int:
    """End as the program did: its exit status; and where a signal ended it, by the same signal."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its core, if it was to leave one
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    return status


# -- Processes that multiprocessing spawns, `mp.spawn`'s ranks among them, forked from a Python of the program's own that has PyTorch loaded.
#
# Each would import PyTorch, which is nearly all that a test of a small model on two ranks waits for. A spawned process finds what it would find
# in a new Python: its parent above it, its environment, folder, streams and random numbers, and PyTorch not yet imported. On Linux, where a
# process can adopt its grandchildren; and where anything that a library may have read differs, a new Python it is.


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CODE = f"""
import sys
sys.path.insert(0, {os.path.dirname(PACKAGE)!r})
from virtualgpu.run import processes
del sys.path[0]
exec(processes.serve(int(sys.argv[1])))
"""
SPAWN_WORD = "--multiprocessing-fork"  # multiprocessing's own, last in the command of each process that it spawns
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
        if args[-1] == SPAWN_WORD and os.fsdecode(path) == sys.executable:
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
    sys.argv[:] = ["-c", SPAWN_WORD]
    forked.draw_own_numbers()
    forked.as_if_not_imported("torch", "virtualgpu")
    return compile(code, "<string>", "exec")
