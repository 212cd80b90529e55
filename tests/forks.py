"""Python programs without the three seconds in which each imports PyTorch: each in a fork of a process that has imported PyTorch and virtualgpu,
and nothing more. What such a program finds is what it would find in a new Python: virtualgpu/run/prefork.py says how. Notebooks' kernels, too
(conftest.py).

`run` and `Popen` are for commands, also for what those start in turn (the runner its program, torchrun its ranks). Python's own end, its flags
and sitecustomize are not in them: a test that is about these starts a Python of its own.
"""

import atexit
import itertools
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from virtualgpu.run import launcher, prefork

DYNAMO = (
    "import sympy, torch.distributed.tensor"  # what torch._dynamo imports at its first use, and what takes its time
)
PARENT = """
import multiprocessing, os, sys, torch, virtualgpu
def first(file, program):
    for stream in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    exec(program, {**globals(), "__name__": "__main__"})
for number, (file, program) in enumerate(PROGRAMS.items()):
    if number == FIRST:
        LIBRARIES
    process = multiprocessing.get_context("fork").Process(target=first, args=(file, program))
    process.start(), process.join()
    with open(file + ".status", "w") as status:
        status.write(str(process.exitcode))
"""


def outcomes(programs: list[str], folder: Path, libraries: str = "pass", first: int = 0) -> list[tuple[int, list[str]]]:
    """Of each program its exit status and the lines that it wrote, one after the other, without the one of virtualgpu.gpus.

    libraries: an import whose first use the programs from this number on are not about: made once for all of them.
    """
    files = {str(folder / str(number)): program for number, program in enumerate(programs)}
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUALGPU", "RANK")}
    code = PARENT.replace("PROGRAMS", repr(files)).replace("LIBRARIES", libraries).replace("FIRST", str(first))
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=environ, check=True, timeout=300)
    ended = [int(Path(f"{file}.status").read_text("utf-8")) for file in files]
    said = [Path(file).read_text("utf-8").splitlines() for file in files]
    return [
        (status, [line for line in lines if "virtual GPUs, each" not in line])
        for status, lines in zip(ended, said, strict=True)
    ]


ROOT = str(Path(__file__).resolve().parents[1])
BEGIN = f"""
import sys
(aside,) = [finder for finder in sys.meta_path if type(finder).__name__ == "_Loaded"]
del sys.meta_path[: sys.meta_path.index(aside) + 1]
sys.modules.update(aside._modules)
sys.path.insert(0, {ROOT!r})
from tests import forks
del sys.path[0]
forks.become"""
# In what an environment may differ from that of the Python that is forked: what nothing reads when PyTorch is imported
OWN = re.compile(
    prefork.OF_RANKS.pattern
    + "|HELPERS_GPUS|PATH|PYTHONPATH|TMPDIR|HOME|USERPROFILE|CUDA_MODULE_LOADING|TRITON_INTERPRET|OMP_(NUM_THREADS|WAIT_POLICY)|TORCHELASTIC_.*|TORCH_NCCL_.*|(GROUP|ROLE|LOCAL)_.*|JPY_PARENT_PID|CLICOLOR(_FORCE)?|FORCE_COLOR|TERM|(GIT_)?PAGER|MPLBACKEND|PYDEVD_USE_FRAME_EVAL|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)
BEFORE = launcher.defaults({}) | os.environ  # what tests set is theirs


class WarmPython(prefork.SpawnServer):
    """The Python that commands are forked from, begun with the first of them."""

    def __init__(self, environ: Mapping[str, str]):
        super().__init__()
        self.environ = environ

    def start_code(self, code: str, environ: Mapping[str, str], ends: Sequence[int]) -> int | None:
        """The number of a child of this process that runs this code; None where it needs a Python of its own."""
        if sys.platform != "linux" or _common(environ) != _common(self.environ):
            return None
        return self.fork(code, self.environ, {number: number for number in {0, 1, 2, *ends}})


class _Within(WarmPython):
    """The same in a command that was forked: forked from it in turn, before the command does anything."""

    def __init__(self, environ):
        super().__init__(environ)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            other.close()
            return
        self._socket.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        exec(prefork.serve(other.detach()), {"__name__": "__main__"})

    def _start(self, environ, flags):
        """It has begun."""


class Popen(subprocess.Popen):
    """subprocess.Popen for `python program.py arguments`, `python -c code`, `python -m module`, and what a launch's ranks are forked from;
    all else is started as ever."""

    python: WarmPython | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        to_child, from_parent, to_parent, from_child, error_to_parent, errors = others[3:9]
        words = [] if isinstance(args, (str, bytes)) else [os.fsdecode(word) for word in args]
        pid = None
        server = words[-2:-1] == ["-c"] and "multiprocessing.forkserver" in words[-1]
        if server:
            words = [words[0], *words[-2:]]  # without the flags of this Python, which the fork has
        if _is_python(words) and preexec_fn is None and (server or (not pass_fds and others[-1] == -1)):
            Popen.python = Popen.python or WarmPython(BEFORE)
            ends = (to_child, from_child, errors)
            told = (
                words[1:],
                dict(os.environ if env is None else env),
                os.fspath(cwd or os.getcwd()),
                ends,
                others[-2],
                sorted(pass_fds),
            )
            pid = Popen.python.start_code(
                f"{BEGIN}(*{told!r})", told[1], [end for end in (*ends, *pass_fds) if end > 2]
            )
        if pid is None:
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
        self.pid, self._child_created = pid, True
        for _ in range(
            30_000 if others[-2] else 0
        ):  # its group is its own soon: who asks for it, to interrupt it, must not get ours
            if os.getpgid(pid) == pid or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.001)
        return self._close_pipe_fds(to_child, from_parent, to_parent, from_child, error_to_parent, errors)


def environment() -> dict[str, str]:
    """This process's, without what libraries have left there since the tests began (torch.profiler does)."""
    return _common(BEFORE) | {name: value for name, value in os.environ.items() if OWN.fullmatch(name)}


def run(*arguments, input=None, timeout=180, env=None, **options) -> subprocess.CompletedProcess:
    """What subprocess.run says of `python arguments`, as text. env: that of `environment()` unless given."""
    options |= {"stdin": None if input is None else subprocess.PIPE, "env": env or environment(), "text": True}
    command = [sys.executable, *map(str, arguments)]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            printed = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, *printed)


def _common(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not OWN.fullmatch(name)}


def _is_python(words: Sequence[str]) -> bool:
    if not words or words[0] != sys.executable:
        return False
    what = (words[2 if words[1:2] == ["-u"] else 1 :] or ["-"])[0]
    return what in ("-c", "-m", "-mpytest") or (what[:1] != "-" and os.path.isfile(what))


def become(
    words: list[str], environ: dict[str, str], folder: str, ends: Sequence[int], session: bool, kept: list[int]
) -> None:
    """In the fork: this command, to its end. kept: open files; who is given some has a process group of its own."""
    for stream, end in enumerate(ends):
        if end >= 0:
            os.dup2(end, stream)
    for before, after in itertools.pairwise([2, *kept, 1 << 12]):
        os.closerange(before + 1, after)
    if kept:
        os.setpgid(0, 0)
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if "OMP_NUM_THREADS" in environ:
        sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))
    if words[0] == "-u":
        del words[0]
        sys.stdout.reconfigure(write_through=True)
    Popen.python, plainly, subprocess.Popen = _Within(environ), subprocess.Popen, Popen
    os.register_at_fork(
        after_in_child=lambda: setattr(subprocess, "Popen", plainly)
    )  # whose children they would not be
    for name in ("tests.forks", "tests"):
        sys.modules.pop(name, None)
    prefork.as_if_not_imported("torch", "virtualgpu")
    status = 0
    try:
        _execute(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            status = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def _execute(words: list[str]) -> None:
    if words[0] == "-mpytest":
        words = ["-m", "pytest", *words[1:]]
    what, *rest = words
    sys.argv[:] = [what, *rest[1:]] if what in ("-c", "-m") else words
    sys.orig_argv[:] = [sys.executable, *words]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in given if path not in ("", launcher.SITE, *sys.path)]
    if what == "-m":
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if what == "-c":
        sys.path[0] = ""
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(what))
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec", dont_inherit=True)
    exec(code, vars(main))
