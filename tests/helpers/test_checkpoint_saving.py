"""What save() writes, and where: nothing that load() would refuse, no file in the place of a device, the earlier file's mode."""

import argparse
import collections
import concurrent.futures
import datetime
import math
import os
import re
import signal
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
    "list(state)[0]": {Path("a"): 1},
    "state['history'][1].item()": {"history": [0.5, np.float64(0.3)]},
    "state.item()": np.int64(3),
    "torch.tensor(state['a'])": {"a": np.zeros(3)},
    "dict(state['by class'])": {"by class": collections.defaultdict(list)},
    "str(state[0])": [Path("a")],
    "str(state['begun'])": {"begun": datetime.datetime.now()},
    "vars(state['options'])": {"options": argparse.Namespace(lr=0.1)},
    "list(state['last'])": {"last": collections.deque([1.0])},
    "set(state['seen'])": {"seen": frozenset([1])},
    "list(list(state)[0])": {range(3)},
    "str(state['rows'])": {"rows": slice(3)},
    "state['model'].state_dict()": {"epoch": 1, "model": nn.Linear(2, 2)},
    "state['lr'].state_dict()": {
        "lr": torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(nn.Linear(2, 2).parameters()), 0.9)
    },
    "int(state['signal'])": {"signal": signal.SIGINT},
    "str(state['large'])": {"large": 10**1000},
}


@pytest.mark.parametrize("cure", UNREADABLE)
def test_what_load_would_refuse_is_not_saved(tmp_path, cure):
    """The message names the part by its key, and what to save instead."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    torch.save(UNREADABLE[cure], tmp_path / "by torch.pt")
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "by torch.pt")
    with pytest.raises(CheckpointError, match=f"load.. would refuse.*{re.escape(cure)}.*nothing was written"):
        checkpoint.save(UNREADABLE[cure], path)
    assert same(checkpoint.load(path), STATE)


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
    """A new one has what the umask leaves, and while it is written nobody else reads it."""
    path, before = tmp_path / "a.pt", os.umask(0o027)
    try:
        checkpoint.save(STATE, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(mode)
    checkpoint.save({"epoch": 2}, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode and checkpoint.load(path) == {"epoch": 2}


def test_a_pipe_stays_one(tmp_path):
    """What is no file is written into: as root, a rename would put a file in /dev/null's place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        content = pool.submit(pipe.read_bytes)
        checkpoint.save(STATE, pipe)
        (tmp_path / "a.pt").write_bytes(content.result(60))
    assert stat.S_ISFIFO(pipe.stat().st_mode) and same(checkpoint.load(tmp_path / "a.pt"), STATE)


def test_a_device_stays_one(tmp_path):
    """Nodes of our own, as /dev/null and /dev/full are; a link to one, too."""
    try:
        for name, minor in (("null", 3), ("full", 7)):
            os.mknod(tmp_path / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            open(tmp_path / name, "wb").close()
    except OSError:
        pytest.skip("only root may make a device here")
    (tmp_path / "link").symlink_to("null")
    checkpoint.save(STATE, tmp_path / "link")
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(STATE, tmp_path / "full")
    assert all(stat.S_ISCHR((tmp_path / name).stat().st_mode) for name in ("null", "full"))
    assert len(os.listdir(tmp_path)) == 3 and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("below", ["a.pt", "folder/a.pt"])
def test_a_parent_that_is_a_file(tmp_path, below):
    (tmp_path / "file.pt").touch()
    with pytest.raises(CheckpointError, match=r"file\.pt is a file, no folder") as caught:
        checkpoint.save(STATE, tmp_path / "file.pt" / below)
    assert "space" not in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs /proc")
def test_a_parent_that_takes_no_files():
    with pytest.raises(CheckpointError, match=r"could not be written to /proc: .*\. Choose another folder"):
        checkpoint.save(STATE, "/proc/a.pt")
