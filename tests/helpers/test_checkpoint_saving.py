"""What save() writes, and where: nothing that load() would refuse, no file in the place of a device, the earlier file's mode."""

import collections
import concurrent.futures
import math
import os
import stat
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers import checkpoint
from helpers.checkpoint import CheckpointError
from tests.helpers.test_checkpoint import STATE, same

UNREADABLE = {
    "numpy.*scalar": {"history": [0.5, np.float64(0.3)]},
    "Path": [Path("a")],
    "defaultdict": {"by class": collections.defaultdict(list)},
    "torch.nn.modules.linear.Linear": {"epoch": 1, "model": nn.Linear(2, 2)},
}


@pytest.mark.parametrize("named", UNREADABLE)
def test_what_load_would_refuse_is_not_saved(tmp_path, named):
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    torch.save(UNREADABLE[named], tmp_path / "by torch.pt")
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "by torch.pt")
    with pytest.raises(CheckpointError, match=f"the state holds .*{named}.*load.. would refuse.*nothing was written"):
        checkpoint.save(UNREADABLE[named], path)
    assert same(checkpoint.load(path), STATE) and len(os.listdir(tmp_path)) == 2


def test_whatever_load_takes_is_saved(tmp_path):
    """Whether it does is PyTorch's to say, not a list's of ours."""
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    adam.step()
    state = [
        model.state_dict(),
        adam.state_dict(),
        collections.Counter("aab"),
        {1, 2},
        torch.Size([2]),
        torch.float32,
        1j,
    ]
    state += [torch.device("cpu"), b"a", -(2**70), nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse(), (None, "b")]
    state += [torch.ones(2, device="meta"), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)]
    state += [torch.get_rng_state(), torch.ones(2).to(torch.float8_e4m3fn), [[{"deep": math.nan}]]]
    checkpoint.save(state, tmp_path / "a.pt")
    assert len(checkpoint.load(tmp_path / "a.pt")) == len(state)
    with torch.serialization.safe_globals([collections.deque]):
        checkpoint.save(collections.deque(), tmp_path / "a.pt")


def test_two_threads_save_to_one_path(tmp_path, monkeypatch):
    """Both are in the middle of their file at the same moment; one of the two is there afterwards, whole."""
    path, together = tmp_path / "a.pt", threading.Barrier(2, timeout=60)
    monkeypatch.setattr(os, "fsync", lambda descriptor: together.wait())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda size: checkpoint.save({"size": size, "w": torch.ones(size)}, path), [10, 500_000]))
    result = checkpoint.load(path)
    assert len(result["w"]) == result["size"] and os.listdir(tmp_path) == ["a.pt"]


def test_another_writer_finishes_while_old_parts_are_looked_for(tmp_path, monkeypatch):
    """Its part has been renamed by the time that its age is asked for."""
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "a.pt.another.part"])
    checkpoint.save(STATE, tmp_path / "a.pt")
    assert same(checkpoint.load(tmp_path / "a.pt"), STATE)


def test_saved_again_by_a_signals_handler(tmp_path, monkeypatch):
    """In the middle of a save, of the same thread: both files are whole, and the interrupted one is there at the end."""
    path, fsync = tmp_path / "a.pt", os.fsync

    def signal(descriptor):
        monkeypatch.setattr(os, "fsync", fsync)
        checkpoint.save({"w": torch.ones(100_000)}, path)
        assert len(checkpoint.load(path)["w"]) == 100_000

    monkeypatch.setattr(os, "fsync", signal)
    checkpoint.save(STATE, path)
    assert same(checkpoint.load(path), STATE) and os.listdir(tmp_path) == ["a.pt"]


def test_loaded_while_another_thread_saves(tmp_path, monkeypatch):
    """What was there when load() began; its size was compared with the new file's content, which was refused."""
    path, is_zipfile = tmp_path / "a.pt", zipfile.is_zipfile
    checkpoint.save(STATE, path)

    def meanwhile(file):
        checkpoint.save({"w": torch.ones(100_000)}, path)
        return is_zipfile(file)

    monkeypatch.setattr(zipfile, "is_zipfile", meanwhile)
    assert same(checkpoint.load(path), STATE)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_an_earlier_files_mode_is_kept(tmp_path, mode):
    checkpoint.save(STATE, tmp_path / "a.pt")
    (tmp_path / "a.pt").chmod(mode)
    checkpoint.save({"epoch": 2}, tmp_path / "a.pt")
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == mode and checkpoint.load(tmp_path / "a.pt") == {
        "epoch": 2
    }


def test_a_pipe_and_a_device_stay_what_they_are(tmp_path):
    """As root, a rename would put a file in /dev/null's place."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(CheckpointError, match="a device or a pipe: name a file"):
            checkpoint.save(STATE, path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("place, why", [
    ("file.pt/a.pt", "a file is in the place of a folder"),
    ("file.pt/folder/a.pt", "a file is in the place of a folder"),
    pytest.param("/proc/a.pt", "no file can be made there",
                 marks=pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs /proc")),
])  # fmt: skip
def test_a_parent_that_takes_no_files(tmp_path, place, why):
    """Space would not help."""
    (tmp_path / "file.pt").touch()
    with pytest.raises(
        CheckpointError, match=rf"could not be written to .*(file\.pt|/proc).*: {why}\. .*Choose another folder, then"
    ):
        checkpoint.save(STATE, tmp_path / place)


@pytest.mark.parametrize("use", [checkpoint.load, lambda path: checkpoint.save(STATE, path)])
def test_what_is_no_files_name(tmp_path, use):
    for path, why in (
        (tmp_path, "is a folder, a device or a pipe: name a file"),
        ("a\0b", "'a.x00b' holds a null character"),
    ):
        with pytest.raises(CheckpointError, match=why):
            use(path)
