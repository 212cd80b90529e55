"""Programs that `fit` and `--explain` try: forked from a Python that has PyTorch loaded, side by side, and none left at the end."""

import array
import contextlib
import ctypes
import errno
import gc
import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.machinery import ModuleSpec, SourceFileLoader

from virtualgpu import environment
from virtualgpu.run import cli
from virtualgpu.run.cli import SITE
from virtualgpu.run.processes import end_tree, kill_tree

# -- A process beside `fit` and `--explain`, which ends the programs that these have started where they are killed (kill -9, a kernel's restart).
#
# It is told of each program by a pipe, and sees the pipe close. Nothing of PyTorch is in it, and signals of the terminal do not reach it.

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WARDEN_CODE = f"""
import sys
sys.path.insert(0, {os.path.dirname(PACKAGE)!r})
from virtualgpu.run.trials import forked
forked.keep_watch(sys.stdin)
"""


class Warden:
    """The process, seen from the one that starts programs."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WARDEN_CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def note(self, word: str, pid: int) -> None:
        """word: "begun" or "ended", of the program with this number."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            self._process.stdin.write(f"{word} {pid}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Programs that run yet are ended by it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def keep_watch(words) -> None:
    """Until the pipe closes; then nothing of the programs that have not ended is left."""
    running = set()
    for line in words:
        word, pid = line.split()
        running.add(int(pid)) if word == "begun" else running.discard(int(pid))
    for pid in running:
        end_tree(pid)


# -- A Python that has PyTorch loaded, and what it starts: scripts forked from it, each of which would take two seconds to import PyTorch.
#
# On Linux: elsewhere a fork of so much is not safe, or there is none. `forked` is what runs in it.


WARM_CODE = f"""
import sys
sys.path[0] = {os.path.dirname(PACKAGE)!r}
from virtualgpu.run.trials import forked
forked.serve(int(sys.argv[1]))
"""
OF_ONE = (environment.VARIABLE, "PATH")  # what two trials' environments differ in


class WarmPython:
    """The process, seen from the one that wants programs started. It starts with the first of them, with that one's environment."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._environ: dict[str, str] | None = None
        self._socket: socket.socket | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str], output) -> "Forked | None":
        """As subprocess.Popen, in a session of its own; None for what is better started by that: no script of this Python, another
        environment, no virtual GPUs, or this process could not be started."""
        if sys.platform != "linux" or environment.VARIABLE not in environ or not _is_script(command):
            return None
        with self._lock:
            if self._environ is None:
                self._begin(environ)
            if self._socket is None or _common(environ) != self._environ:
                return None
            theirs, ours = os.pipe()
            words = [os.getcwd(), *(environ.get(name, "") for name in OF_ONE), *command[1:]]
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [output.fileno(), ours]))]
                self._socket.sendmsg(["\0".join(words).encode(errors="surrogateescape")], rights)
            except OSError:  # it has gone, or these are too many words for it
                os.close(theirs)
                return None
            finally:
                os.close(ours)
        try:
            return Forked(theirs)
        except EOFError:
            return None

    def end(self) -> None:
        """Who waits for its answer gets none. What it has started goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()

    def _begin(self, environ: Mapping[str, str]) -> None:
        self._environ = _common(environ)
        with contextlib.suppress(OSError):  # no process more: the program's own start will say so
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", WARM_CODE, str(other.fileno())],
                    env={**self._environ, "PATH": environ.get("PATH", os.defpath)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=True,
                )


class Forked:
    """A program that a warm Python has started, with the part of Popen that `Programs` needs. Raises EOFError if it has not."""

    def __init__(self, told: int):
        self._told = os.fdopen(told, "rb", buffering=0)
        self._status: int | None = None
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Its status, negative for a signal. Raises TimeoutExpired, as Popen's does."""
        if self._status is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program", timeout or 0)
            try:
                self._status = os.waitstatus_to_exitcode(self._number())
            except EOFError:  # who waited for it was killed
                self._status = -signal.SIGKILL
            self._told.close()
        return self._status

    def kill(self) -> None:
        """End it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        line = self._told.readline()
        if not line:
            self._told.close()
            raise EOFError
        return int(line)


def _is_script(command: Sequence[str]) -> bool:
    """Source code for this Python, without a flag for it."""
    if command[0] != sys.executable or command[1].startswith("-"):
        return False
    try:
        with open(command[1], "rb") as file:
            return command[1].endswith(".py") or file.read(2) == b"#!"
    except OSError:  # Python says what is wrong
        return False


def _common(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in OF_ONE}


# -- Programs side by side, of which none is left at the end, also where this process is killed.


LAUNCHER = re.compile(r"(^|/)(torchrun|accelerate|deepspeed)$|^torch\.distributed\.(run|launch)$")
ROOM = 2 << 30  # bytes of this machine's memory that a trial may take: PyTorch, and a model's shapes


def side_by_side(command: Sequence[str], gpus: Sequence[int]) -> int:
    """How many trials at a time: one a core, as far as this machine's memory goes; one, where they might meet at the same port."""
    launched = max(gpus) > 1 or any(LAUNCHER.search(word) for word in command)
    if launched and "--standalone" not in command:
        return 1
    free = None
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        free = 1024 * int(file.read().partition("MemAvailable:")[2].split()[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, (free or ROOM) // ROOM))


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """In this block SIGTERM leaves no program, as an interrupt does not: it raises SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Programs:
    """Those that run now; at the block's end, and at an interrupt, none of them is left."""

    def __init__(self):
        self._lock, self._running, self._ended = threading.Lock(), set(), False

    def __enter__(self) -> "Programs":
        self._warden, self._warm = Warden(), WarmPython()
        return self

    def __exit__(self, *error) -> None:
        self.end()
        self._warden.dismiss()

    def run(self, command: list[str], environ: dict[str, str], output, limit: float | None = None) -> int | None:
        """The program's exit status, once it has ended; None where it was ended after `limit` seconds. What it printed is in `output`, a file."""
        if threading.current_thread() is threading.main_thread():
            # there an interrupt could come in the midst of Popen, and leave a program that nobody knows
            return self.side_by_side(lambda _: self.run(command, environ, output, limit), [None], 1)[0]
        with self._lock:
            if self._ended:
                raise InterruptedError("the search was ended")
            child = self._warm.start(command, environ, output) or subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(child)
            self._warden.note("begun", child.pid)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with self._lock:
                self._running.discard(child)
            kill_tree(child.pid)  # what it left behind
            child.kill()
            child.wait()
            with self._lock:
                self._warden.note("ended", child.pid)
        if self._ended:
            raise InterruptedError("the search was ended")
        return status

    def output_of(
        self, command: Sequence[str], environ: Mapping[str, str], folder: str, limit: float | None = None
    ) -> tuple[int | None, str]:
        """As `run`: the exit status, and all that the program printed, which is kept in `folder` meanwhile."""
        output = os.path.join(folder, "output")
        with open(output, "wb") as file:
            status = self.run(cli.command(list(command), environ.get("PATH")), dict(environ), file, limit)
        with open(output, encoding="utf-8", errors="replace") as file:
            return status, file.read()

    def side_by_side(self, function: Callable, items: Iterable, jobs: int) -> list:
        """What the function, which runs programs, returns for each item: so many at a time. Raises what one of them raises, what a
        signal's handler does, and OSError where no thread can be started; then no program is left.

        The main thread wakes now and then: a signal that the system gave to another thread is handled only then.
        """
        with ThreadPoolExecutor(jobs) as pool:
            try:
                try:
                    futures = [pool.submit(function, item) for item in items]
                except RuntimeError as error:  # no thread more
                    raise OSError(errno.EAGAIN, str(error)) from None
                while True:
                    done, running = wait(futures, 0.5, FIRST_EXCEPTION)
                    for future in done:
                        future.result()  # raises what it raised
                    if not running:
                        return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.end()
                raise

    def end(self) -> None:
        """All of them are ended, with what they started, and no other begins."""
        self._warm.end()  # nobody waits for it to be warm
        with self._lock:
            self._ended, running = True, list(self._running)
        for child in running:
            kill_tree(child.pid)
            child.kill()


# -- Inside a warm Python: scripts run as Python would run them, each in a process forked when PyTorch was loaded and nothing else had happened.
#
# A script finds PyTorch not yet imported: virtual GPUs are on when it imports it, as everywhere, with the variables that it has set until then.


SET_NAME = 15  # linux/prctl.h, PR_SET_NAME: what top shows


def serve(number: int) -> None:
    """Until the other end of the socket closes. Each program has a process above it, which tells its number and how it ended."""
    load()  # and nothing of ours that needs it: that, too, may be a script's way to import it
    requests = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, rights, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        if not message:
            os._exit(0)
        output, telling = array.array("i", rights[0][2])
        if os.fork():
            os.close(output)
            os.close(telling)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.close(telling)
            status = _run(message.decode(errors="surrogateescape").split("\0"), output)
            sys.exit(status)  # as a script ends, flushed and with atexit
        os.close(output)
        os.write(telling, b"%d\n" % pid)
        os.write(telling, b"%d\n" % os.waitpid(pid, 0)[1])
        os._exit(0)


def load() -> None:
    """PyTorch, before anything is forked."""
    gc.disable()
    import torch  # noqa: F401

    gc.enable()
    gc.freeze()  # a collection would walk through a million objects, and copy the pages that programs share


def draw_own_numbers() -> None:
    """Each process begins with a seed of its own, which those that are forked have in common; Python itself gives its own anew."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _run(words: list[str], output: int) -> int:
    """The script's status."""
    os.setsid()
    ctypes.CDLL(None).prctl(SET_NAME, os.path.basename(words[3]).encode(errors="surrogateescape"), 0, 0, 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    folder, os.environ[environment.VARIABLE], os.environ["PATH"], *sys.argv[:] = words
    os.chdir(folder)
    draw_own_numbers()
    as_if_not_imported("torch")
    try:
        _run_script(sys.argv[0])
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        with contextlib.suppress(Exception):
            sys.stdout.flush()  # before the error, as Python does
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0


def _run_script(path: str) -> None:
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def as_if_not_imported(*packages: str) -> None:
    """Their modules are put aside until the script imports PyTorch; then `sitecustomize` turns virtual GPUs on."""
    spec = importlib.util.spec_from_file_location("virtualgpu_site", os.path.join(SITE, "sitecustomize.py"))
    assert spec is not None and spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    sys.meta_path[:0] = [site._Finder(), _Loaded({name: sys.modules.pop(name) for name in names})]


class _Loaded:
    """Finds PyTorch where it was put aside, once."""

    def __init__(self, modules: dict[str, types.ModuleType]):
        self._modules = modules

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec):
        self._spec = self._modules["torch"].__spec__
        return self._modules["torch"]

    def exec_module(self, torch) -> None:
        torch.__spec__ = self._spec
        ours_too = environment.__package__ not in sys.modules  # else the script has imported it anew
        for name, module in self._modules.items():
            if ours_too or name.partition(".")[0] == "torch":
                sys.modules[name] = module
        sys.meta_path.remove(self)
