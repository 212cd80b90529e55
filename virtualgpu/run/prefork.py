"""Processes forked from a Python that has PyTorch loaded: to import it takes each two seconds, nearly all that a small program takes.

`ScriptServer` starts the scripts that `fit` and `--explain` try, `SpawnServer` what multiprocessing spawns under the runner, `mp.spawn`'s
ranks among them. (The ranks of `launch` come from multiprocessing's own server, ranks/forkserver.py.) Each is asked through a socket, over
which the open files of the new process travel as well. What is forked finds what it would find in a new Python: its folder, streams,
environment and random numbers, and PyTorch not yet imported; it is when it imports PyTorch that virtual GPUs are on, with the variables
that it has set until then.

On Linux: elsewhere a fork of so much is not safe, or there is none. Where anything that a library may have read differs from what it was
when the server began, a new Python it is.
"""

import array
import contextlib
import ctypes
import gc
import importlib.util
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import util

from virtualgpu import environment
from virtualgpu.run.cli import SITE
from virtualgpu.run.processes import ROOT, SUBREAPER

CODE = """
import sys
sys.path.insert(0, {root!r})
from virtualgpu.run import prefork
del sys.path[0]
exec(prefork.{serve}(int(sys.argv[1])))
"""
SET_NAME, GET_SUBREAPER = 15, 37  # linux/prctl.h, PR_SET_NAME (what top shows) and PR_GET_CHILD_SUBREAPER


class _Server:
    """The process, seen from the one that asks. It starts with the first request."""

    serve: str  # what it does, a function below

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None

    def _start(self, environ: Mapping[str, str], flags: Sequence[str] = (), new_session: bool = False) -> None:
        with contextlib.suppress(OSError):  # no process more: the program's own start will say so
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                code = CODE.format(root=ROOT, serve=self.serve)
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", code, str(other.fileno())],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=new_session,
                )

    def _ask(self, message: bytes, files: Sequence[int]) -> None:
        """Raises OSError where it has gone, or these are too many words for it."""
        assert self._socket is not None
        self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])


def _requests(requests: socket.socket) -> Iterator[tuple[bytes, Sequence[int]]]:
    """In the server, until the other end of the socket closes: what is asked for, and files that are open."""
    while True:
        message, rights, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 256))
        if not message:
            os._exit(0)
        yield message, array.array("i", rights[0][2])


def _without(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# -- Scripts that `fit` and `--explain` try

OF_ONE = (environment.VARIABLE, "PATH")  # what two trials' environments differ in


class ScriptServer(_Server):
    """Starts scripts, each in a session of its own."""

    serve = "serve_scripts"

    def __init__(self):
        super().__init__()
        self._environ: dict[str, str] | None = None  # that of the first script

    def start(self, command: Sequence[str], environ: Mapping[str, str], output) -> "Forked | None":
        """As subprocess.Popen; None for what is better started by that: no script of this Python, another
        environment, no virtual GPUs, or this process could not be started."""
        if sys.platform != "linux" or environment.VARIABLE not in environ or not _is_script(command):
            return None
        with self._lock:
            if self._environ is None:
                self._begin(environ)
            if self._socket is None or _without(OF_ONE, environ) != self._environ:
                return None
            from_server, to_us = os.pipe()
            words = [os.getcwd(), *(environ.get(name, "") for name in OF_ONE), *command[1:]]
            try:
                self._ask("\0".join(words).encode(errors="surrogateescape"), [output.fileno(), to_us])
            except OSError:
                os.close(from_server)
                return None
            finally:
                os.close(to_us)
        try:
            return Forked(from_server)
        except EOFError:
            return None

    def _begin(self, environ: Mapping[str, str]) -> None:
        self._environ = _without(OF_ONE, environ)
        self._start({**self._environ, "PATH": environ.get("PATH", os.defpath)}, new_session=True)

    def end(self) -> None:
        """Who waits for its answer gets none. What it has started goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()


class Forked:
    """A script that the server has started, with the part of Popen that `Programs` needs. Raises EOFError if it has not."""

    def __init__(self, messages: int):
        self._messages = os.fdopen(messages, "rb", buffering=0)
        self._status: int | None = None
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Its status, negative for a signal. Raises TimeoutExpired, as Popen's does."""
        if self._status is None:
            if not select.select([self._messages], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program", timeout or 0)
            try:
                self._status = os.waitstatus_to_exitcode(self._number())
            except EOFError:  # who waited for it was killed
                self._status = -signal.SIGKILL
            self._messages.close()
        return self._status

    def kill(self) -> None:
        """End it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        line = self._messages.readline()
        if not line:
            self._messages.close()
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


def serve_scripts(number: int) -> None:
    """The server. Each script has a process above it, which tells its number and how it ended."""
    load()  # and nothing of ours that needs it: that, too, may be a script's way to import it
    requests = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for message, (output, to_parent) in _requests(requests):
        if os.fork():
            os.close(output)
            os.close(to_parent)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.close(to_parent)
            sys.exit(_run(message.decode(errors="surrogateescape").split("\0"), output))  # flushed and with atexit
        os.close(output)
        os.write(to_parent, b"%d\n" % pid)
        os.write(to_parent, b"%d\n" % os.waitpid(pid, 0)[1])
        os._exit(0)


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


# -- Processes that multiprocessing spawns

SPAWN_WORD = "--multiprocessing-fork"  # multiprocessing's own, last in the command of each process that it spawns
OF_THE_RUNNER = (environment.VARIABLE, environment.PROFILED)
# What programs set for their ranks, and nothing reads when PyTorch is imported
OF_RANKS = re.compile(
    "MASTER_(ADDR|PORT)|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|PYTEST_.*|CUDA_VISIBLE_DEVICES|NCCL_.*|GLOO_.*|"
    + "|".join(OF_THE_RUNNER)
)


class SpawnServer(_Server):
    """Forks what multiprocessing spawns; the process that asked adopts it."""

    serve = "serve_spawned"

    def __init__(self):
        super().__init__()
        self._began: tuple | None = None  # the circumstances

    def install(self) -> None:
        """From here on, in this process and those that are forked from it, each with a server of its own."""
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
            self._ask(message, numbers)
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
        self._start(_without(OF_THE_RUNNER, os.environ), args[1:-3])
        if self._process is not None:
            self._process.returncode = 0  # nobody waits for it: it ends when this process does

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _circumstances(args: Sequence) -> tuple:
    """What a process has from its parent, and may not be changed in one that has imported PyTorch."""
    return _common(os.environ), args[1:-3], os.sched_getaffinity(0), os.getpgrp(), os.getuid()


def _common(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not OF_RANKS.fullmatch(name)}


def serve_spawned(number: int) -> types.CodeType:
    """The server. Returns in each child, with the code that multiprocessing has for it."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; the parent decides
    load()
    import virtualgpu.run.child
    import virtualgpu.session  # noqa: F401

    requests = socket.socket(fileno=number)
    for message, files in _requests(requests):
        from_between, to_server = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(to_server, b"%d" % pid)
                os._exit(0)  # and whoever asked adopts it
            for end in (requests.detach(), from_between, to_server):
                os.close(end)
            signal.signal(signal.SIGINT, interrupt)
            return _become(message, files)
        for end in (to_server, *files):
            os.close(end)
        os.waitpid(between, 0)
        requests.send(os.read(from_between, 32))
        os.close(from_between)
    raise AssertionError("requests have no end but that of this process")


def _become(asked: bytes, files: Sequence[int]) -> types.CodeType:
    """A Python that has just started: these are its open files, by the numbers that its parent knows them by."""
    import fcntl  # not on Windows

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
    draw_own_numbers()
    as_if_not_imported("torch", "virtualgpu")
    return compile(code, "<string>", "exec")


# -- What both do inside the server and what it forks


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
