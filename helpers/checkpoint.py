"""Checkpoints that survive: lesson 01 builds the same thing in six lines; this one adds the error messages.

A file appears under its name only when it is whole, so a process that is killed while writing loses nothing. Loading
accepts tensors and plain values, never code.
"""

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

import virtualgpu

_FILE = "a file is in the place of a folder"
_WHY = {errno.EEXIST: _FILE, errno.ENOTDIR: _FILE, errno.ENOENT: "no file can be made there"}


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read. The message says why, what is safe, and what to do."""


def save(state: Any, path: str | Path) -> None:
    """Write `state` (a state_dict, or a dict of them) to `path`, whole or not at all; behind a link, to the file it names.

    In a dry run what has no values is not written, with a warning.
    Raises CheckpointError where load() would refuse a part of `state`, the place cannot be written, or the disk is full;
    an earlier file stays as it was.
    """
    path = Path(os.path.realpath(_named(path)))  # else the rename would put the file in the link's place
    # In the same folder: across disks a rename would copy. Two writers, a signal's handler also, write two parts
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
            with contextlib.suppress(FileNotFoundError):  # another's, who has finished by now
                if time.time() - left.stat().st_mtime > 3600:  # a living writer wrote within the hour
                    left.unlink()
        if (machine := virtualgpu.machine()) and machine.dry:
            torch.save(state, part)
            if not part.exists():
                return  # a dry run has no values to write, and torch.save has said so
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, not only in the system's cache, before the name changes
        if refused := torch.serialization.get_unsafe_globals_in_checkpoint(part):
            raise CheckpointError(
                f"the state holds {', '.join(sorted(refused))}, which load() would refuse: it reads tensors and plain values "
                "alone. Save the state_dict() of an object, the .item() of a number; nothing was written."
            )
        with contextlib.suppress(FileNotFoundError):  # there is no earlier one
            shutil.copymode(path, part)
        os.replace(part, path)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        cause = error  # torch.save wraps a full disk in an error of its own
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        why, cure = error, "Save tensors, numbers, text and the state_dict() of objects."
        if cause is not None:
            # mkdir says "File exists" of a file in the folder's place, /proc "No such file" of one to be made
            why = _WHY.get(cause.errno, cause.strerror)
            space = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            cure = f"Choose another folder{' or free some space' * space}, then save again."
        raise CheckpointError(
            f"{path.name} could not be written to {path.parent}: {why}. An earlier checkpoint of that name is untouched. {cure}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def load(path: str | Path, map_location: Any = "cpu") -> Any:
    """Read what `save` (or `torch.save` of tensors and plain values) wrote; tensors land on `map_location`.

    Raises FileNotFoundError where there is no such file, and CheckpointError where it is empty, truncated, changed
    since (by its checksums), no checkpoint at all, or one that would run code; also for a place that is not there.
    """
    with open(_named(path), "rb") as file:
        if complaint := _complaint(file):
            raise CheckpointError(f"{Path(path).name} {complaint}")
        file.seek(0)
        try:
            return torch.load(file, map_location=map_location, weights_only=True)
        except (MemoryError, torch.OutOfMemoryError):  # says it better, and the file is whole
            raise
        except Exception as error:
            complaint = f"cannot be loaded: {str(error).strip().splitlines()[0]}"
            # around what it refuses, PyTorch's message advises to let it run
            named = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
            if named:
                complaint = (
                    f"was refused: it is more than tensors and plain values ({named[1].rstrip('.')}). Ask its "
                    "author for a state_dict; allow code only from someone whom you would let use your keyboard."
                )
            raise CheckpointError(f"{Path(path).name} {complaint}") from error


def _named(path: str | Path) -> str | Path:
    """This path, where a file is or can be. Raises CheckpointError."""
    if "\0" in os.fspath(path):
        raise CheckpointError(f"{os.fspath(path)!r} holds a null character, which no file's name may: name a file.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is a folder, a device or a pipe: name a file.")
    return path


def _complaint(file: BinaryIO) -> str | None:
    """What torch.load does not look at: it compares no checksums, and unpacks what torch.save never packs."""
    head, size = file.read(8), os.fstat(file.fileno()).st_size
    if not head:
        return "is empty: its writer was cut off, or the disk was full. Load an earlier checkpoint."
    if head.startswith(b"\x80"):  # a pickle alone, as torch.save wrote before version 1.6
        return None
    if not head.startswith(b"PK"):
        return f"is not a PyTorch checkpoint: it begins with {head!r}. Was a web page or an image saved in its place?"
    try:
        if not zipfile.is_zipfile(file):
            return f"is truncated ({size:,} bytes): its writer was cut off, or the download was. Load an earlier checkpoint."
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.filename.endswith("/constants.pkl") for member in members):
                return "was refused: it is a TorchScript program, which is code. Ask its author for a state_dict."
            if sum(member.file_size for member in members) > size:
                return f"was refused: its {size:,} bytes would unpack to more, and torch.save packs nothing."
            for member in members:
                if member.CRC:  # 0: saved without (torch.serialization.set_crc32_options)
                    with archive.open(member) as content:
                        while content.read(1 << 20):
                            pass
    except Exception:  # zipfile has many words for it: BadZipFile, zlib.error, UnicodeDecodeError, ...
        return "is damaged: it is not what was written, by its checksums. Load an earlier checkpoint."
    return None
