"""How a program is started: its cards, its folder and its environment, the command for what was typed; and why a system starts no more."""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping

from virtualgpu import environment, scratch
from virtualgpu.environment import Card
from virtualgpu.hardware import specs

# -- The cards of `virtualgpu.hardware`, as the runner asks for them.


DEFAULT = 2  # GPUs, as virtualgpu.gpus()


def find_cards(gpus: int | None, like: str, memory: int | str | None) -> tuple[Card, ...]:
    """`gpus` cards like `like`: a name, a file, or several with commas. Raises ValueError, in a sentence."""
    if gpus is None and ("," not in like or os.path.exists(like)):
        gpus = DEFAULT
    names = [like] if os.path.exists(like) else [name.strip() for name in like.split(",")]
    cards = specs.find_specs(gpus, like, memory)
    names = [
        os.path.abspath(name) if os.path.isfile(name) else name for name in names
    ]  # the program may change the folder
    names = names * len(cards) if len(names) == 1 else names
    return tuple(Card(name, spec.name, spec.memory, spec.capability) for name, spec in zip(names, cards, strict=True))


# -- Start a program on virtual GPUs, wait for it, and tell what it did.


HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(HERE, "site")
SMI = os.path.join(HERE, "nvidia_smi.py")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads wait
MACHINE_CODE = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Linux, Windows, macOS


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A place for what processes leave, and for their nvidia-smi; removed at the end."""
    with scratch.lent() as path:
        if os.name == "posix":
            tool = os.path.join(path, "bin", "nvidia-smi")
            os.mkdir(os.path.dirname(tool))
            script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(SMI)} "$@"\n'
            with open(tool, "wb") as file:  # without site and environment: it starts in a tenth of the time
                file.write(os.fsencode(script))  # paths may have any letters, in any locale
            os.chmod(tool, 0o755)
        yield path


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
    is, so that no sum changes. Triton's kernels are interpreted, which needs NumPy (torch_api/hooks.py): there is no driver to compile for.
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


# -- What a system says that has no process, thread or open file more to give, and the cure.


MORE_FILES = "raise this process's limit, by `ulimit -n 1024` before it starts"
CURES = {
    # unexpected EOF: multiprocessing's, of a forkserver that ended at once
    r"can't start new thread|Resource temporarily unavailable|unexpected EOF": "no process or thread more: raise this user's limit, "
    "`ulimit -u`, start fewer, or free memory of this machine",
    r"Too many open files": MORE_FILES,
}


def cure(message: str) -> str:
    """To add to that error's message, in brackets; nothing where it is another error."""
    return next((f" ({sentence})" for pattern, sentence in CURES.items() if re.search(pattern, message)), "")


# -- The command line of `python -m virtualgpu`.
