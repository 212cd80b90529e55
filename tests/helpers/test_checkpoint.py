"""Checkpoints that survive: whatever happens while writing or reading, the last good file stays, and the message names the cure."""

import builtins
import errno
import os
import pickle
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

from helpers import checkpoint
from helpers.checkpoint import CheckpointError

STATE = {"epoch": 1, "model": {"weight": torch.arange(6.0).view(2, 3)}, "note": ["a", 2.5, None]}


def same(a, b):
    return (
        a["epoch"] == b["epoch"] and a["note"] == b["note"] and torch.equal(a["model"]["weight"], b["model"]["weight"])
    )


def test_what_was_saved_is_loaded(tmp_path):
    checkpoint.save(STATE, tmp_path / "new folder" / "a.pt")
    assert same(checkpoint.load(tmp_path / "new folder" / "a.pt"), STATE)
    assert os.listdir(tmp_path / "new folder") == ["a.pt"]


@pytest.mark.parametrize("after", [0, 100_000, 2_000_000])
def test_a_writer_killed_anywhere_loses_nothing(tmp_path, after):
    """SIGKILL once `after` bytes of the new file have been written; the next save also clears what the dead one left."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    script = f"""
import builtins, os, signal, torch
from helpers import checkpoint
class Doomed:
    def __init__(self, *args):
        self.file = builtins.open(*args, buffering=0)
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def fileno(self): return self.file.fileno()
    def flush(self): pass
    def write(self, chunk):
        self.file.write(chunk)
        if self.file.tell() >= {after}:
            os.kill(os.getpid(), signal.SIGKILL)
checkpoint.open = Doomed
checkpoint.save({{"epoch": 2, "model": {{"weight": torch.ones(1_000_000)}}}}, {str(path)!r})
"""
    killed = subprocess.run([sys.executable, "-c", script])
    assert killed.returncode == -signal.SIGKILL
    assert same(checkpoint.load(path), STATE)
    assert len(os.listdir(tmp_path)) == 2, "the dead writer's unfinished file"
    checkpoint.save(STATE, path)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_the_unfinished_file_of_a_living_writer_is_left_alone(tmp_path):
    (tmp_path / f"a.pt.{os.getppid()}.part").touch()
    checkpoint.save(STATE, tmp_path / "a.pt")
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_torch_writes(tmp_path, monkeypatch):
    """/dev/full answers every write with ENOSPC, as a full disk does."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    monkeypatch.setattr(checkpoint, "open", lambda name, mode: builtins.open("/dev/full", mode), raising=False)  # noqa: SIM115
    with pytest.raises(CheckpointError, match=r"No space left.*untouched.*Free some space"):
        checkpoint.save({"model": torch.ones(1_000_000)}, path)
    monkeypatch.undo()
    assert same(checkpoint.load(path), STATE)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_disk_that_fills_at_the_last_moment(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(STATE, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


def test_interrupted_while_writing(tmp_path, monkeypatch):
    """Ctrl-C stays a KeyboardInterrupt, and costs neither the earlier file nor a forgotten one."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({"model": torch.ones(1_000_000)}, path)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert same(checkpoint.load(path), STATE)


def test_a_folder_that_may_not_be_written(tmp_path):
    folder = tmp_path / "read only"
    folder.mkdir()
    checkpoint.save(STATE, folder / "a.pt")
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:  # root may write anywhere: become nobody for a moment
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*another folder"):
            checkpoint.save(STATE, folder / "a.pt")
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
    assert same(checkpoint.load(folder / "a.pt"), STATE)


def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path):
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save({"function": lambda: 0}, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("keep", [10, 0.3, 0.9, -1])
def test_truncated(tmp_path, keep):
    path = tmp_path / "a.pt"
    checkpoint.save({"model": torch.ones(10_000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))] if isinstance(keep, float) else whole[:keep])
    with pytest.raises(CheckpointError, match=r"a.pt is (truncated|damaged).*earlier checkpoint"):
        checkpoint.load(path)


def test_empty(tmp_path):
    (tmp_path / "a.pt").touch()
    with pytest.raises(CheckpointError, match=r"empty.*earlier checkpoint"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [b"<!DOCTYPE html>", b"\x89PNG\r\n\x1a\n", b"version https://git-lfs", b"x"])
def test_foreign(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a PyTorch checkpoint"):
        checkpoint.load(tmp_path / "a.pt")


def test_another_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(CheckpointError, match=r"not written by torch\.save"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_hostile(tmp_path, zipped):
    """In today's format and in the one before PyTorch 1.6: refused, and nothing of it ran."""

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"weight": Hostile()}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"refused.*posix.mkdir"):
        checkpoint.load(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_a_whole_model_is_refused_by_name(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"Linear.*state_dict"):
        checkpoint.load(tmp_path / "a.pt")


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.pt"):
        checkpoint.load(tmp_path / "a.pt")


def test_saved_on_a_gpu(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        checkpoint.save(STATE, tmp_path / "a.pt")
    assert checkpoint.load(tmp_path / "a.pt")["model"]["weight"].device.type == "cpu"
