"""Processes forked from a Python that has PyTorch loaded: to import it takes each two seconds, nearly all that a small program takes.

`ScriptServer` starts the scripts that `fit` and `--explain` try, `SpawnServer` what multiprocessing spawns under the runner, `mp.spawn`'s
ranks among them. (The ranks of `launch` come from multiprocessing's own server, ranks/forkserver.py.) A server is asked through a socket, over
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
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import util

from virtualgpu import environment
from virtualgpu.run.launcher import SITE
from virtualgpu.run.processes import ROOT, SUBREAPER

CODE = f"""
import sys
sys.path.insert(0, {ROOT!r})
from virtualgpu.run import prefork
del sys.path[0]
exec(prefork.serve(int(sys.argv[1])))
"""
SET_NAME, GET_SUBREAPER = 15, 37  # linux/prctl.h, PR_SET_NAME (what top shows) and PR_GET_CHILD_SUBREAPER
# What programs set for their ranks and trials, and nothing reads when PyTorch is imported
OF_RANKS = re.compile(
    "MASTER_(ADDR|PORT)|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|PYTEST_.*|CUDA_VISIBLE_DEVICES|NCCL_.*|GLOO_.*|PATH|"
    + environment.VARIABLE
)


class Server:
    """The process, seen from the one that asks for forks, and adopts them. It starts with the first request."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._began: tuple | None = None  # the circumstances

    def fork(
        self, what: str | list[str], environ: Mapping[str, str], files: Mapping[int, int], flags: Sequence[str] = ()
    ) -> int | None:
        """The number of a new child of this process; None where it is better started anew, or could not be started.

        what: the code that it executes, or a script with its arguments. files: those that it has open, by its numbers and by ours.
        flags: of Python.
        """
        with self._lock:
            now = _circumstances(environ, flags)
            if self._began is None:
                self._began = now
                self._start(environ, flags)
            if self._socket is None or now != self._began:
                return None
            message = pickle.dumps((dict(environ), os.getcwd(), what, list(files)))
            before, prctl = ctypes.c_int(), ctypes.CDLL(None).prctl
            prctl(GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            prctl(SUBREAPER, 1, 0, 0, 0)
            try:
                opened = array.array("i", files.values())
                self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, opened)])
                pid = int(self._socket.recv(32))
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is not our child
                return pid
            except (OSError, ValueError):  # it has gone, or these are too many words, or numbers of closed files
                self._forget()
                return None
            except BaseException:  # Ctrl-C: its answer must not be taken for the next child's
                self._forget()
                raise
            finally:
                prctl(SUBREAPER, before.value, 0, 0, 0)

    def end(self) -> None:
        """Who waits for its answer gets none. What it has started goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget()

    def _start(self, environ: Mapping[str, str], flags: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # no process more: the program's own start will say so
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", CODE, str(other.fileno())],
                    env={name: value for name, value in environ.items() if name != environment.VARIABLE},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                )

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _circumstances(environ: Mapping[str, str], flags: Sequence[str]) -> tuple:
    """What a process has from its parent, and may not be changed in one that has imported PyTorch."""
    common = {name: value for name, value in environ.items() if not OF_RANKS.fullmatch(name)}
    return common, flags, os.sched_getaffinity(0), os.getpgrp(), os.getuid()


class ScriptServer(Server):
    """Starts scripts that `fit` and `--explain` try, each in a session of its own."""

    def start(self, command: Sequence[str], environ: Mapping[str, str], output) -> "Forked | None":
        """As subprocess.Popen; None for what is better started by that: no script of this Python, another environment, no virtual GPUs, or
        this process could not be started."""
        if sys.platform != "linux" or environment.VARIABLE not in environ or not _is_script(command):
            return None
        pid = self.fork(list(command[1:]), environ, dict.fromkeys((1, 2), output.fileno()))
        return None if pid is None else Forked(pid)


class Forked(subprocess.Popen):
    """A process that a server has forked: a child like any other."""

    def __init__(self, pid: int):
        self._forked = pid
        super().__init__([])

    def _execute_child(self, *args):
        self.pid, self._child_created = self._forked, True


def _is_script(command: Sequence[str]) -> bool:
    """Source code for this Python, without a flag for it."""
    if command[0] != sys.executable or command[1].startswith("-"):
        return False
    try:
        with open(command[1], "rb") as file:
            return command[1].endswith(".py") or file.read(2) == b"#!"
    except OSError:  # Python says what is wrong
        return False


SPAWN_WORD = "--multiprocessing-fork"  # multiprocessing's own, last in the command of each process that it spawns


class SpawnServer(Server):
    """Forks what multiprocessing spawns."""

    def install(self) -> None:
        """From here on, in this process and those that are forked from it, each with a server of its own."""
        plainly = util.spawnv_passfds
        util.spawnv_passfds = lambda path, args, passfds: self.start(plainly, path, args, passfds)
        os.register_at_fork(after_in_child=self.__init__)  # type: ignore[misc]

    def start(self, plainly: Callable[..., int], path, args: Sequence, fds: Sequence[int]) -> int:
        """multiprocessing.util.spawnv_passfds: the number of the new process, a child of this one."""
        if args[-1] == SPAWN_WORD and os.fsdecode(path) == sys.executable:
            pid = self.fork(args[-2], os.environ, {number: number for number in {0, 1, 2, *map(int, fds)}}, args[1:-3])
            if pid is not None:
                return pid
        return plainly(path, args, fds)

    def _start(self, environ: Mapping[str, str], flags: Sequence[str]) -> None:
        super()._start(environ, flags)
        if self._process is not None:
            self._process.returncode = 0  # nobody waits for it: it ends when this process does


# -- In the server, and in what it forks


def serve(number: int) -> types.CodeType:
    """The server, until the other end of the socket with this number closes. Returns in each child that is to execute code."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; the parent decides
    gc.disable()
    import torch  # noqa: F401

    gc.enable()
    gc.freeze()  # a collection would walk through a million objects, and copy the pages that programs share
    for module in ("virtualgpu.run.child", "virtualgpu.session"):  # what each process of a program imports
        importlib.import_module(module)

    requests = socket.socket(fileno=number)
    while True:
        message, rights, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 256))
        if not message:
            os._exit(0)
        files = array.array("i", rights[0][2])
        ours, theirs = socket.socketpair()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                theirs.send(b"%d" % pid)
                os._exit(0)  # and whoever asked adopts it
            requests.close()
            ours.close()
            if not theirs.recv(
                1
            ):  # the server was killed before it could tell the number: nobody would know this process
                os._exit(0)
            theirs.close()
            signal.signal(signal.SIGINT, interrupt)
            return _become(message, files)
        for file in files:
            os.close(file)
        theirs.close()
        os.waitpid(between, 0)
        with ours:
            requests.send(ours.recv(32))
            ours.send(b"!")


def _become(asked: bytes, files: Sequence[int]) -> types.CodeType:
    """A Python that has just started: these are its open files, by the numbers that its parent knows them by. A script is run to its end."""
    import fcntl  # not on Windows

    environ, folder, what, numbers = pickle.loads(asked)
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
    draw_own_numbers()
    as_if_not_imported("torch", "virtualgpu")
    if isinstance(what, list):
        sys.exit(_run(what))  # flushed and with atexit
    sys.argv[:] = ["-c", SPAWN_WORD]
    return compile(what, "<string>", "exec")


def _run(words: list[str]) -> int:
    """The script's status."""
    os.setsid()
    ctypes.CDLL(None).prctl(SET_NAME, os.path.basename(words[0]).encode(errors="surrogateescape"), 0, 0, 0)
    sys.argv[:] = words
    try:
        _run_script(words[0])
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
