"""Processes see what others hold of a GPU, for as long as they live."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tests.virtualgpu.run.test_environment import T4
from virtualgpu.environment import Settings
from virtualgpu.memory.ledger import Board, Ledger, entries, share

OTHER = """
import sys
from virtualgpu.memory.ledger import Ledger
ledger = Ledger(sys.argv[1], 2)
ledger.note(1, used=300, allocated=100, reserved=200)
ledger.time(1, busy=0.5, now=2.0)
print("noted", flush=True)
for line in sys.stdin:
    ledger.end() if line == "end\\n" else ledger.note(1, used=int(line))
    print("noted", flush=True)
"""


@pytest.fixture
def other(tmp_path):
    """Another process with a ledger in the same folder; tell(text) waits until it has obeyed."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def tell(text=None):
        if text is not None:
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
        assert process.stdout.readline() == "noted\n"

    process.tell = tell
    tell()
    yield process
    process.kill()
    process.communicate()


def test_others_are_counted_while_they_live(other, tmp_path):
    mine = Ledger(str(tmp_path), 2)
    mine.note(1, used=7)
    assert (mine.others(0), mine.others(1)) == (0, 300)
    other.tell(500)
    assert mine.others(1) == 500
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped by its parent
    assert mine.others(1) == 0
    other.wait()
    assert mine.others(1) == 0
    (entry,) = [entry for entry in entries(str(tmp_path)) if entry.pid == other.pid]
    assert entry.gpus[1] == (500, 100, 200, 0.5, 2.0, 0.5, 0) and not entry.ended  # for the table


def test_ending_gives_back_and_keeps_peaks(other, tmp_path):
    other.tell("end")
    assert Ledger(str(tmp_path), 2).others(1) == 0
    (entry,) = entries(str(tmp_path))
    assert entry.ended and entry.gpus[1] == (0, 100, 200, 0.5, 2.0, 0.5, 0)


def test_a_pid_that_came_again_is_another_process(other, tmp_path):
    path = tmp_path / f"{other.pid}.ledger"
    content = bytearray(path.read_bytes())
    content[8:16] = (1).to_bytes(8, sys.byteorder)  # as if started in the system's first moments
    path.write_bytes(content)
    assert Ledger(str(tmp_path), 2).others(1) == 0


def test_a_forked_process_has_its_own_page(tmp_path):
    mine = Ledger(str(tmp_path), 1)
    mine.note(0, used=10, reserved=10)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        mine.note(0, used=20)
        os.write(write, b"%d" % mine.others(0))
        signal.pause()
    assert os.read(read, 10) == b"10"
    assert mine.others(0) == 20
    assert [entry.gpus[0].used for entry in entries(str(tmp_path))] == [10, 20]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert mine.others(0) == 0


def test_peaks_are_the_largest_noted_and_no_file_is_there_before(tmp_path):
    mine = Ledger(str(tmp_path), 1)
    assert not mine.begun and mine.others(0) == 0 and entries(str(tmp_path)) == []
    for used, allocated, reserved in ((5, 3, 4), (9, 8, 9), (2, 1, 1)):
        mine.note(0, used, allocated, reserved)
    (entry,) = entries(str(tmp_path))
    assert mine.begun and entry.gpus[0][:3] == (2, 8, 9)


def test_a_folder_that_has_gone_disturbs_nobody(tmp_path):
    mine = Ledger(str(tmp_path / "gone"), 1)
    mine.note(0, used=1)
    with mine.lock():
        assert mine.others(0) == 0
    mine.end()


def test_the_lock_excludes_others(tmp_path):
    with open(tmp_path / "lock", "w") as file:
        with Ledger(str(tmp_path), 1).lock(), pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_board_adds_up_what_lives(other, tmp_path):
    mine = Ledger(str(tmp_path), 2)
    mine.note(1, used=7)
    mine.time(1, busy=0.5, now=1.0)
    board = Board(Settings((T4, T4), folder=str(tmp_path)))
    assert sorted(board.processes(1)) == sorted([(os.getpid(), 7), (other.pid, 300)])
    assert board.processes(0) == [] and board.busy(1) == (1.0, 2.0)
    assert share(board.busy(1), (0.0, 0.0)) == 0.5 and share((1.0, 2.0), (1.0, 2.0)) == 0.0
