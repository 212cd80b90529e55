"""Checkpoints that survive: notebook 01 builds the same thing in six lines; this one adds the error messages.

A file appears under its name only when it is whole, so a process that is killed while writing loses nothing. Loading
accepts tensors and plain values, never code.
"""

import contextlib
import errno
import glob
import os
import platform
import re
import stat
import uuid
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from helpers.readable import CheckpointError, require_readable


def save(state: Any, path: str | Path) -> None:
    """Write `state` (a state_dict, or a dict of them) to `path`, whole or not at all.

    Where `path` is a symbolic link, the file that it points to is written; an earlier file's mode is kept. A device or a
    pipe is written into. Raises CheckpointError where load() would refuse a part of `state`, the folder cannot be written,
    or the disk is full; an earlier file stays as it was.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder: add the file's name to it.")
    require_readable(state)
    part = None
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                return torch.save(state, file)
        path = Path(os.path.realpath(path))  # else the rename would put the file in the link's place
        folder = next(folder for folder in path.parents if os.path.lexists(folder))
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is a file, no folder: {path.name} needs another place.")
        # Same folder: a rename across disks would copy. Two threads of a process write two parts
        part = path.with_name(f"{path.name}.{_host()}.{uuid.uuid4().hex[:8]}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts_of_the_dead(path)
        earlier = path.stat() if path.exists() else None
        part.touch(0o600 if earlier else 0o666)
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, not only in the system's cache, before the name changes
        if earlier:
            with contextlib.suppress(OSError, AttributeError):  # root may; Windows has no owners
                os.chown(part, earlier.st_uid, earlier.st_gid)
            part.chmod(stat.S_IMODE(earlier.st_mode))
        os.replace(part, path)
    except BaseException as error:
        if part:
            _remove(part)
        cause = _system_error(error)
        if cause is None:
            raise
        cure = "Free some space or choose" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
        raise CheckpointError(
            f"{path.name} could not be written to {path.parent}: {cause.strerror}. An earlier checkpoint of that name is "
            f"untouched. {cure} another folder, then save again."
        ) from error


def load(path: str | Path, map_location: Any = "cpu") -> Any:
    """Read what `save` (or `torch.save` of tensors and plain values) wrote; tensors land on `map_location`.

    Raises FileNotFoundError where there is no such file, and CheckpointError where it is empty, truncated, changed
    since (by its checksums), no checkpoint at all, or one that would run code; also for a place that is not there.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder: name the file in it.")
    with open(path, "rb") as file:  # once: another thread may put another file under the name meanwhile
        head = file.read(8)
        if not head:
            raise CheckpointError(
                f"{path.name} is empty: its writer was cut off, or the disk was full. Load an earlier checkpoint."
            )
        if head.startswith(b"PK"):  # torch.save writes a zip archive
            _check(path, file)
        elif not head.startswith(b"\x80"):  # nor a pickle, as torch.save wrote before version 1.6
            raise CheckpointError(
                f"{path.name} is not a PyTorch checkpoint: it begins with {head!r}. Was a web page or an image saved in "
                "its place?"
            )
        file.seek(0)
        try:
            return torch.load(file, map_location=map_location, weights_only=True)
        except (MemoryError, torch.OutOfMemoryError):  # says it better, and the file is whole
            raise
        except Exception as error:
            raise CheckpointError(f"{path.name} {_why(error, file, map_location)}") from error


def _check(path: Path, file: BinaryIO) -> None:
    """Is the archive what its checksums say? torch.load compares none, and unpacks what torch.save never packs."""
    size = os.fstat(file.fileno()).st_size
    try:
        if not zipfile.is_zipfile(file):
            raise CheckpointError(
                f"{path.name} is truncated ({size:,} bytes): its writer was cut off, or the download was. "
                "Load an earlier checkpoint, or fetch the file again."
            )
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise CheckpointError(
                    f"{path.name} was refused: it is a TorchScript program, which is code. Ask its author for a state_dict."
                )
            unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > size:
                raise CheckpointError(
                    f"{path.name} was refused: {size:,} bytes would unpack to {unpacked:,}, and torch.save packs "
                    "nothing. If you trust where it is from, load it by torch.load and save it anew."
                )
            for member in archive.infolist():
                if member.CRC:  # 0: saved without (torch.serialization.set_crc32_options)
                    with archive.open(member) as content:
                        while content.read(1 << 20):
                            pass
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # zipfile has many words for it: BadZipFile, zlib.error, UnicodeDecodeError, ...
        raise CheckpointError(
            f"{path.name} is damaged: it is not what was written, by its checksums. Load an earlier checkpoint."
        ) from error


def _why(error: Exception, file: BinaryIO, map_location: Any) -> str:
    """What torch.load's error means for the reader: the rest of a sentence that begins with the file's name."""
    words = str(error)
    code = re.search(r"GLOBAL (\S+)", words)
    if code:
        return (
            f"was refused: to load it, Python would have to run {code[1]}, which it names. "
            "Ask its author for a state_dict; allow code only from someone you would let use your keyboard."
        )
    unread = re.search(r"WeightsUnpickler error:\s*(.+)", words)  # around it PyTorch advises weights_only=False
    if unread:
        return (
            f"was refused: it holds more than tensors and plain values, or is no checkpoint ({unread[1].rstrip('.')}). "
            "Ask its author for a state_dict, saved by torch.save with its defaults."
        )
    why = words.strip().partition("\n")[0].rstrip(".")
    if _is_whole(file):
        return f'is whole, but cannot go to map_location={map_location!r}: {why}. Leave map_location out: "cpu" goes everywhere.'
    return f"is damaged or was not written by torch.save: {why}. Load an earlier checkpoint."


def _is_whole(file: BinaryIO) -> bool:
    """Does it load where there is no choice of place?"""
    with contextlib.suppress(Exception):
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
        return True
    return False


def _remove_parts_of_the_dead(path: Path) -> None:
    """Writers that were killed leave their unfinished file; nobody else will ever want it.

    Another host's stay: where a folder is shared, their writers may live.
    """
    for part in path.parent.glob(f"{glob.escape(path.name)}.{_host()}.*.part"):
        pid = part.suffixes[-2][1:]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(part)


def _host() -> str:
    return re.sub(r"[^\w-]", "_", platform.node())


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def _system_error(error: BaseException | None) -> OSError | None:
    """The OSError at the bottom: on a full disk torch.save wraps it in a RuntimeError of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
