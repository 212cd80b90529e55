"""Checkpoints that survive: whatever happens while writing or reading, the last good file stays, and the message names the cure."""

import builtins
import collections
import errno
import os
import pickle
import re
import signal
import zipfile

import pytest
import torch
from torch import nn

import virtualgpu
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
def test_a_writer_killed_anywhere_loses_nothing(tmp_path, monkeypatch, after):
    """SIGKILL once `after` bytes of the new file have been written; a later save also clears what the dead one left."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    later = {"epoch": 2, "model": {"weight": torch.ones(1_000_000)}}

    class Doomed:
        def __init__(self, *args):
            self.file = builtins.open(*args, buffering=0)  # noqa: SIM115
            self.fileno = self.file.fileno

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def flush(self):
            pass

        def write(self, chunk):
            self.file.write(chunk)
            if self.file.tell() >= after:
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(checkpoint, "open", Doomed, raising=False)
    writer = os.fork()
    if writer == 0:
        try:
            checkpoint.save(later, path)
        finally:
            os._exit(1)
    monkeypatch.undo()
    assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
    assert same(checkpoint.load(path), STATE)
    assert len(os.listdir(tmp_path)) == 2, "the dead writer's unfinished file"
    for left in tmp_path.glob("*.part"):
        os.utime(left, (0, 0))
    checkpoint.save(STATE, path)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_the_unfinished_file_of_a_living_writer_is_left_alone(tmp_path):
    """It wrote a moment ago, on this machine or on another that shares the folder."""
    (tmp_path / "a.pt.1.1.part").touch()
    checkpoint.save(STATE, tmp_path / "a.pt")
    assert len(os.listdir(tmp_path)) == 2


def test_a_name_with_brackets_and_stars(tmp_path):
    """It is no pattern: what a dead writer left goes, and nothing else."""
    for name in ("a[1]*.pt.1.1.part", "a1b.pt.1.1.part"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    checkpoint.save(STATE, tmp_path / "a[1]*.pt")
    assert sorted(os.listdir(tmp_path)) == ["a1b.pt.1.1.part", "a[1]*.pt"]


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays_one(tmp_path, there):
    """latest.pt -> runs/3.pt: the file behind it is written."""
    (tmp_path / "runs").mkdir()
    if there:
        checkpoint.save({"epoch": 0}, tmp_path / "runs" / "3.pt")
    (tmp_path / "latest.pt").symlink_to("runs/3.pt")
    checkpoint.save(STATE, tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert same(checkpoint.load(tmp_path / "runs" / "3.pt"), STATE)
    assert os.listdir(tmp_path / "runs") == ["3.pt"]


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"is a folder.*name a file"):
        checkpoint.save(STATE, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_torch_writes(tmp_path, monkeypatch):
    """/dev/full answers every write with ENOSPC, as a full disk does."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    monkeypatch.setattr(checkpoint, "open", lambda name, mode: builtins.open("/dev/full", mode), raising=False)  # noqa: SIM115
    with pytest.raises(CheckpointError, match=r"No space left.*untouched.*free some space"):
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
    with pytest.raises(CheckpointError, match=r"could not be written.*lambda.* Save tensors, numbers, text"):
        checkpoint.save({"function": lambda: 0}, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


def test_a_dry_run_writes_nothing_and_goes_on(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save({"epoch": 1}, path)
    with virtualgpu.dry_run(like="T4"):
        with pytest.warns(UserWarning, match="no values to save"):
            checkpoint.save(torch.nn.Linear(3, 2).cuda().state_dict(), path)
        checkpoint.save({"epoch": 2}, tmp_path / "b.pt")
    assert checkpoint.load(path) == {"epoch": 1} and checkpoint.load(tmp_path / "b.pt") == {"epoch": 2}
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


@pytest.mark.parametrize("keep", [10, 0.3, 0.9, -1])
def test_truncated(tmp_path, keep):
    path = tmp_path / "a.pt"
    checkpoint.save({"model": torch.ones(10_000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))] if isinstance(keep, float) else whole[:keep])
    with pytest.raises(CheckpointError, match=r"a.pt is (truncated|damaged).*earlier checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("where", ["weight", "names"])
def test_one_bit_that_flipped(tmp_path, where):
    """torch.load gives another number in silence."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    content = bytearray(path.read_bytes())
    at = content.index(STATE["model"]["weight"].numpy().tobytes() if where == "weight" else b"epoch")
    content[at + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a.pt is damaged: .*checksums.*earlier checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("bit", [1, 128])
def test_wherever_a_bit_flips(tmp_path, bit):
    """The state that was saved, or a sentence: never another state, never Python's own error."""
    path = tmp_path / "a.pt"
    checkpoint.save(STATE, path)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        try:
            assert same(checkpoint.load(path), STATE)
        except CheckpointError:
            refused += 1
    assert refused > len(whole) // 7 // 4  # the rest is padding


def test_saved_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint.save(STATE, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(checkpoint.load(tmp_path / "a.pt"), STATE)


def test_a_small_file_that_unpacks_to_a_large_one(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save({"model": torch.zeros(1_000_000)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in whole.infolist():
            packed.writestr(member.filename, whole.read(member))
    with pytest.raises(CheckpointError, match=r"refused: its .* bytes would unpack to more"):
        checkpoint.load(path)


@pytest.mark.parametrize("place", ["cuda:0", "cuda:9", "gpu", "cpu:x"])
def test_a_place_that_is_not_there(tmp_path, place):
    """The file is whole, and the message does not say otherwise."""
    checkpoint.save(STATE, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a.pt cannot be loaded: \S") as caught:
        checkpoint.load(tmp_path / "a.pt", map_location=place)
    assert "damaged" not in str(caught.value)


def test_a_gpu_that_is_too_small_says_so(tmp_path):
    checkpoint.save({"weight": torch.zeros(1 << 24)}, tmp_path / "a.pt")
    with virtualgpu.gpus(1, memory="16 MB"), pytest.raises(torch.OutOfMemoryError):
        checkpoint.load(tmp_path / "a.pt", map_location="cuda:0")


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
    with pytest.raises(CheckpointError, match=r"a.pt cannot be loaded"):
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


@pytest.mark.parametrize("form", ["a pickle", "today's", "of protocol 4"])
def test_hostile_in_todays_pickle(tmp_path, form):
    """Python's own default protocol, which PyTorch does not read: refused, without PyTorch's advice to let it run."""

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "a.pt"
    if form == "a pickle":
        path.write_bytes(pickle.dumps({"weight": Hostile()}))
    else:
        zipped = form == "today's"
        torch.save({"weight": Hostile()}, path, pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"a.pt was refused.*author") as caught:
        checkpoint.load(path)
    assert not re.search("damaged|weights_only|False", str(caught.value))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what, named", [
    (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    (collections.deque(), "collections.deque"),
    (eval, r"[\w.]*eval"),
])  # fmt: skip
def test_what_is_no_plain_value_is_refused_by_name(tmp_path, what, named):
    """And without PyTorch's advice to allow it."""
    torch.save(what, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"plain values \({named}\)\. Ask its author for a state_dict"):
        checkpoint.load(tmp_path / "a.pt")


def test_torchscript_is_refused(tmp_path):
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"refused: it is a TorchScript program.*state_dict") as caught:
        checkpoint.load(tmp_path / "a.pt")
    assert "weights_only" not in str(caught.value)


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.pt"):
        checkpoint.load(tmp_path / "a.pt")


def test_saved_on_a_gpu(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        checkpoint.save(STATE, tmp_path / "a.pt")
    assert checkpoint.load(tmp_path / "a.pt")["model"]["weight"].device.type == "cpu"
