"""Start a program on virtual GPUs, wait for it, and tell what it did."""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from virtualgpu import environment, scratch
from virtualgpu.memory.ledger import entries
from virtualgpu.run import table
from virtualgpu.run.process_tree import end_marked

HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(HERE, "site")
SMI = os.path.join(HERE, "smi", "__main__.py")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads wait
MACHINE_CODE = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Linux, Windows, macOS


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A place for what processes leave, and for their nvidia-smi; removed at the end."""
    path = scratch.folder()
    try:
        if os.name == "posix":
            tool = os.path.join(path, "bin", "nvidia-smi")
            os.mkdir(os.path.dirname(tool))
            script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(SMI)} "$@"\n'
            with open(tool, "wb") as file:  # without site and environment: it starts in a tenth of the time
                file.write(os.fsencode(script))  # paths may have any letters, in any locale
            os.chmod(tool, 0o755)
        yield path
    finally:
        scratch.remove(path)


def variables(settings: environment.Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What to set in a process's environment so that it, and whatever it starts, has these virtual GPUs."""
    names = {environment.VARIABLE: settings.text(), "PYTHONPATH": first(SITE, environ.get("PYTHONPATH"))}
    if settings.folder:
        names["PATH"] = first(os.path.join(settings.folder, "bin"), environ.get("PATH", os.defpath))
    return names


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """What a program gets that says nothing else.

    Threads that wait for others sleep: by default OpenMP's turn in circles meanwhile, for as long as a processor's whole share of time
    where ranks, or a neighbour, want it as well (on two shared cores a small GPT took 12 to 15 times as long). Their number stays what it
    is, so that no sum changes. Triton's kernels are interpreted, which needs NumPy (torch_api/triton.py): there is no driver to compile for.
    """
    names = {} if any(name in environ for name in WAITING) else {"OMP_WAIT_POLICY": "passive"}
    if importlib.util.find_spec("numpy") is not None:
        names["TRITON_INTERPRET"] = "1"
    return names


def environment_of(settings: environment.Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program on these virtual GPUs."""
    return {**defaults(environ), **environ, **variables(settings, environ)}


def first(path: str, others: str | None) -> str:
    """A list of folders, such as PATH, with this one before all others."""
    return os.pathsep.join([path, *(part for part in (others or "").split(os.pathsep) if part and part != path)])


def run(settings: environment.Settings, arguments: list[str], trace: str | None, quiet: bool) -> int:
    """The program's exit status, as Popen gives it (negative: the signal that ended it); 1 for 0 where its trace could not be written.
    `arguments`: what Python would get, or a command.

    Raises ValueError where this Python was told to heed no environment, or no site: then virtual GPUs could not be there;
    OSError where there is no room for its folder, or no process more.
    """
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("Python's -I, -E and -S keep virtual GPUs out of the program: start it without them")
    with folder() as path:
        settings = settings._replace(folder=path)
        environ = environment_of(settings, os.environ)
        started = command(arguments, environ["PATH"])
        if os.name == "posix":
            from virtualgpu.run.supervisor import Supervisor

            supervisor = Supervisor(path)
            try:
                status = supervisor.wait(subprocess.Popen(started, env=environ))
            finally:
                supervisor.dismiss()
            if status < 0 or 128 < status <= 128 + signal.NSIG:  # of itself, or of what a shell ran: ranks may be left
                end_marked(path)
        else:  # Windows knows neither groups nor these signals
            with subprocess.Popen(started, env=environ) as program:
                status = _wait(program)
        complete = _tell(settings, path, trace, quiet, sys.stderr)
    return status or int(not complete)


def command(arguments: list[str], search: str | None = None) -> list[str]:
    """What to start. A script goes to this Python, and so does a command that is one (torchrun); any other command runs by itself.
    search: the PATH on which it is found; this process's own unless given.

    Raises ValueError for a word that is neither a file nor a command.
    """
    name, *rest = arguments
    path = None if name.startswith("-") else _find(name, search)
    if path is None or _is_python(path):
        return [sys.executable, *interpreter_flags(sys.orig_argv), path or name, *rest]
    return [path, *rest]


def _find(name: str, search: str | None) -> str:
    """A file or a folder with a program in it, as Python takes them; otherwise a command, of this Python's environment or on PATH."""
    if os.path.exists(name) and (not os.path.isdir(name) or os.path.exists(os.path.join(name, "__main__.py"))):
        return name
    if os.path.basename(name) != name or name.endswith(".py"):
        return name  # a path: Python says that there is nothing
    beside = os.path.dirname(os.path.abspath(sys.executable))
    path = shutil.which(name, path=beside) or shutil.which(name, path=search)
    if path is None and not os.path.exists(name):
        raise ValueError(f"{name!r} is neither a file here nor a command on PATH")
    return path or name


def _is_python(path: str) -> bool:
    """Source code, or something else that Python takes, rather than a program that runs by itself."""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        return True
    try:
        with open(path, "rb") as file:
            first, second = file.readline(256), file.readline(256)
    except OSError:  # not ours to read: Python says it
        return True
    if first.startswith(b"#!/bin/sh") and second.startswith(b"'''exec' "):
        return True  # pip's way to start a Python whose path has a space
    if first.startswith(b"#!"):
        return any(os.path.basename(word).startswith(b"python") for word in first[2:].split())
    return not first.startswith(MACHINE_CODE)


def interpreter_flags(command: list[str]) -> list[str]:
    """What stood between `python` and `-m virtualgpu`: -u, -X dev, -W error and their kind are meant for the program."""
    for index, word in enumerate(command[1:-1], 1):
        if command[index + 1] == "virtualgpu" and re.fullmatch("-[a-zA-Z]*m", word):
            return command[1:index] + ([word[:-1]] if word != "-m" else [])
    return []


def _wait(program: subprocess.Popen) -> int:
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return program.wait()


def _tell(settings: environment.Settings, folder: str, trace: str | None, quiet: bool, out: TextIO | None) -> bool:
    """False where the trace could not be written."""
    processes, complete = entries(folder), True
    lines = [] if quiet else table.lines(processes, settings)
    if trace is not None:
        from virtualgpu.run import traces

        sentence = traces.merge(folder, processes, trace)
        complete = not sentence.startswith(traces.NOT_WRITTEN)
        lines += [] if quiet and complete else [sentence]
    if settings.report:
        from virtualgpu.run import report

        lines += report.collect(folder)
    if out is not None and lines:
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            out.write("\n".join(lines) + "\n")
            out.flush()
    return complete
