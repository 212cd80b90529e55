"""Checkpoints that survive: notebook 01 builds the same thing in six lines; this one adds the error messages.

A file appears under its name only when it is whole, so a process that is killed while writing loses nothing. Loading
accepts tensors and plain values, never code.
"""

import contextlib
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import psutil
import torch


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read. The message says why, what is safe, and what to do."""


def save(state: Any, path: str | Path) -> None:
    """Write `state` (a state_dict, or a dict of them) to `path`, whole or not at all.

    Raises CheckpointError where the folder cannot be written or the disk is full; an earlier file stays as it was.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # same folder: a rename across disks would copy
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts_of_the_dead(path)
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, not only in the system's cache, before the name changes
        os.replace(part, path)
    except BaseException as error:
        _remove(part)
        cause = _system_error(error)
        if cause is None:
            raise
        raise CheckpointError(
            f"{path.name} could not be written: {cause.strerror}. An earlier checkpoint of that name is untouched. "
            "Free some space or choose another folder, then save again."
        ) from error


def load(path: str | Path, map_location: Any = "cpu") -> Any:
    """Read what `save` (or `torch.save` of tensors and plain values) wrote; tensors land on `map_location`.

    Raises FileNotFoundError where there is no such file, and CheckpointError where it is empty, truncated, no
    checkpoint at all, or one that would run code.
    """
    path = Path(path)
    with open(path, "rb") as file:
        head = file.read(8)
    if not head:
        raise CheckpointError(
            f"{path.name} is empty: its writer was cut off, or the disk was full. Load an earlier checkpoint."
        )
    if head.startswith(b"PK"):  # torch.save writes a zip archive
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path.name} is truncated ({path.stat().st_size:,} bytes): its writer was cut off, or the download "
                "was. Load an earlier checkpoint, or fetch the file again."
            )
    elif not head.startswith(b"\x80"):  # nor a pickle, as torch.save wrote before version 1.6
        raise CheckpointError(
            f"{path.name} is not a PyTorch checkpoint: it begins with {head!r}. Was a web page or an image saved in "
            "its place?"
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code:
            raise CheckpointError(
                f"{path.name} was refused: to load it, Python would have to run {code[1]}, which it names. "
                "Ask its author for a state_dict; allow code only from someone you would let use your keyboard."
            ) from error
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"{path.name} is damaged or was not written by torch.save: {why}. Load an earlier checkpoint."
        ) from error


def _remove_parts_of_the_dead(path: Path) -> None:
    """Writers that were killed leave their unfinished file; nobody else will ever want it."""
    for part in path.parent.glob(f"{path.name}.*.part"):
        pid = part.suffixes[-2][1:]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(part)


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def _system_error(error: BaseException | None) -> OSError | None:
    """The OSError at the bottom: on a full disk torch.save wraps it in a RuntimeError of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
