"""A process that dies while it saves: at which of its moments, the caller says."""

import io
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checks.grader import Skipped

CHANGES = {
    "os.rename": "before a rename",
    "os.remove": "before a file is removed",
    "shutil.copyfile": "before a file is copied",
}


def needs_fork() -> None:
    """Raises Skipped where a process cannot be forked (Windows)."""
    if not hasattr(os, "fork"):
        raise Skipped("this grader kills copies of a process, which needs Linux or macOS: on Windows, use WSL or Colab")


def killed_at(moment: int, save: Callable, state: Any, path: Path) -> tuple[str | None, str | None]:
    """Let save(state, path) run in a child, which dies at its moment number `moment`: (what it was doing, None). Where it comes to its end
    before: (None, None); where it goes wrong, a complaint stands second."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: this child needs none
        child = os.fork()
    if child == 0:
        _die_at(moment, save, state, path, writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (said, None) if status == 1 else (None, said or None)


def _die_at(moment: int, save: Callable, state: Any, path: Path, writing: int) -> None:
    moments, whole = itertools.count(1), torch.save

    def end(status: int, said: str = "") -> None:
        os.write(writing, said.encode())
        os._exit(status)  # nothing is tidied up: no except, no finally, no buffer is written

    def real(name: str | bytes | os.PathLike) -> Path:
        return Path(os.fsdecode(os.path.realpath(name)))

    def reached() -> bool:
        return next(moments) == moment

    def hook(event: str, args: tuple) -> None:
        if ending or event not in ("open", *CHANGES):
            return
        names = [real(name) for name in args[:2] if isinstance(name, (str, bytes, os.PathLike))]
        if not any(folder in name.parents for name in names):
            return
        if event == "open":
            name, writes = names[0], isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if writes and reached():
                ending.append(name)
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # as it is a moment after
                end(1, f"right after {name.name} was opened for writing")
        else:
            if event == "os.rename" and not near(names[0]):
                end(2, "your second file lies in another folder: where that is on another disk, it cannot be renamed")
            if reached():
                end(1, CHANGES[event])

    def near(name: Path) -> bool:
        """On the checkpoint's disk wherever that is: below its folder or beside it, and no mount of its own."""
        return folder.parent in name.parents and os.stat(name).st_dev == os.stat(folder).st_dev

    def in_two_halves(state: Any, file: Any, *args, **options) -> None:
        content = io.BytesIO()
        whole(state, content, *args, **options)
        half = len(content.getvalue()) // 2
        target = file if hasattr(file, "write") else open(file, "wb")  # noqa: SIM115 - closed below
        target.write(content.getvalue()[:half])
        target.flush()
        if reached():
            end(1, "in the middle of torch.save")
        target.write(content.getvalue()[half:])
        if target is not file:
            target.close()

    folder = real(path.parent)
    ending: list[Path] = []
    sys.addaudithook(hook)
    torch.save = in_two_halves
    try:
        save(state, path)
    except BaseException as error:
        end(2, f"your code raised {type(error).__name__}: {error}")
    end(0)
