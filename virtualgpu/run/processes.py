"""The processes of a run: each signal reaches the program once, and nothing is left at the end."""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time

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


# -- A process beside the runner, `fit` and `--explain`, which ends the programs that these have started where they are killed (kill -9, a
# kernel's restart).
#
# It is told of each program by a pipe, and sees the pipe close. Nothing of PyTorch is in it, and signals of the terminal do not reach it.

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the folder that holds the package
WATCH = f"""
import sys
sys.path.insert(0, {ROOT!r})
from virtualgpu.run import processes
processes.end_with(*sys.argv[1:])
"""


class Warden:
    """The process, seen from the one that starts programs. folder: removed in the end, where the programs have one in common, whose name stands
    in the environment of whatever they started."""

    def __init__(self, folder: str = ""):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCH, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self.pipe = self._process.stdin.fileno()

    def note(self, word: str, pid: int) -> None:
        """word: "begun" or "ended", of the program with this number."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            os.write(self.pipe, f"{word} {pid}\n".encode())

    def dismiss(self) -> None:
        """It ends, and nothing else does."""
        self._process.kill()
        self._process.communicate()


def end_with(folder: str) -> None:
    """Until the pipe closes; then nothing of the programs that have not ended is left."""
    running = set()
    for line in sys.stdin:
        word, pid = line.split()
        running.add(int(pid)) if word == "begun" else running.discard(int(pid))
    for pid in running:
        end_tree(pid)
    if folder:
        end_marked(folder)
        shutil.rmtree(folder, ignore_errors=True)


# -- Signals between a terminal, the runner and its program: each reaches the program exactly once.
#
# A terminal sends Ctrl-C to the whole process group, so the program has it already, and passing it on would interrupt it twice.
# `kill PID` sends a signal to the runner alone, which must pass it on. The two look alike to the receiver. So the runner keeps a
# second process in its group, the supervisor: what the supervisor hears as well was sent to the group.
#
# Where the runner itself is killed, alone or with all of its group (as at the restart of a notebook's kernel), the warden ends the program and
# what that has started (torchrun's ranks, which are in groups of their own).


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
        self._warden = Warden(folder)
        from_runner, self._living = _pipe()
        self._heard, to_runner = _pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for end in (self._warden.pipe, self._living, self._heard):  # which the runner alone holds open
                    os.close(end)
                _listen(from_runner, to_runner, before)
            finally:
                os._exit(0)
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
            self._warden.note("begun", program.pid)
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
        self._warden.dismiss()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

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
    import fcntl  # not on Windows

    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return read, write


def _listen(from_runner: int, to_runner: int, mask: set[int]) -> None:
    """The supervisor, until the runner is gone. It lets go of the runner's streams: whoever reads the program's output must not wait for it."""
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.write(to_runner, _HEARD.pack(number, time.monotonic())))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.read(from_runner, 1)


def end_as(status: int) -> int:
    """End as the program did: its exit status; and where a signal ended it, by the same signal."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its core, if it was to leave one
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    return status
