"""What ranks print comes back, whatever way they print it; and where each rank stands at the time limit."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import HURRY
from virtualgpu.run.ranks import WorkerError, launch, watch


def words_before_an_error():
    print("one ...", end="")
    raise ValueError


def words_before_a_sudden_end():
    print("one ...", end="", flush=True)
    os._exit(1)


def a_stream_like_others():
    sys.stdout.writelines(["a\n", "b\n"])
    sys.stdout.flush()
    sys.stdout.buffer.write("é, as bytes\n".encode())
    print("to stderr", file=sys.stderr)
    print("half of a pair: \udc80")
    subprocess.run(["true"], stdout=sys.stdout, check=True)
    found = sys.stdout.isatty(), sys.stdout.writable(), sys.stdout.fileno() >= 0, sys.stdout.encoding
    sys.stdout.close()
    assert found == (False, True, True, "utf-8")


def write(letter):
    for _ in range(50):
        sys.stdout.write(letter * 60_000 + "\n")


def threads():
    started = [threading.Thread(target=write, args=letter) for letter in "abc"]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


class Talking:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        print("item", index, "." * 1000)
        return index


def a_loader():
    from torch.utils.data import DataLoader

    list(DataLoader(Talking(), num_workers=2))


@pytest.mark.parametrize("worker, lines, fails", [
    (lambda: print("first\nlast", end=""), ["first", "last"], None),
    (words_before_an_error, ["one ..."], "ValueError"),
    (words_before_a_sudden_end, ["one ..."], "exited with status 1"),
    (lambda: print("é" * 5_000_000, end=""), ["é" * 5_000_000], None),
    (a_stream_like_others, ["a", "b", "é, as bytes", "to stderr", "half of a pair: \\udc80"], None),
    (threads, [letter * 60_000 for letter in "abc" for _ in range(50)], None),  # they do not mix their lines
    (a_loader, sorted(f"item {index} {'.' * 1000}" for index in range(40)), None),  # its workers neither
], ids=["no end", "error", "sudden end", "long", "stream", "threads", "loader"])  # fmt: skip
def test_what_a_rank_prints_comes_back(capsys, worker, lines, fails):
    with pytest.raises(WorkerError, match=fails) if fails else contextlib.nullcontext():
        launch(worker, nprocs=1)
    found = capsys.readouterr().out.splitlines()
    assert (sorted(found) if worker in (threads, a_loader) else found) == [f"[rank 0] {line}" for line in lines]


# -- where each rank stands


def receives_from(source, other):
    """The rank `source` does `other`, and the other rank waits for its message."""
    if dist.get_rank() == source:
        return other()
    return dist.recv(torch.ones(1), src=source)


def waits():
    time.sleep(60)


RECEIVES = r"stands in line \d+, in receives_from, which waits in recv"


@pytest.mark.parametrize("worker, zero, one", [
    (lambda: receives_from(1, waits), RECEIVES, r"stands in line \d+, in waits"),
    (lambda: receives_from(0, int), "is done, and waits for the others", RECEIVES),
    # lines of Python itself are not the reader's
    (lambda: threading.Event().wait(), *[r"stands in line \d+, in <lambda>, which waits in wait"] * 2),
])  # fmt: skip
def test_a_rank_that_hangs_ends_at_the_time_limit(worker, zero, one):
    words = rf"not done after {HURRY} s \(the timeout\). Where each rank stood:\n  rank 0 {zero}\n  rank 1 {one}"
    with pytest.raises(WorkerError, match=f"^{words}$") as caught:
        launch(worker, timeout=HURRY)
    assert caught.value.rank is None
    assert [f"  {place}" for place in caught.value.places] == str(caught.value).splitlines()[1:]


def test_the_limit_begins_when_all_ranks_have_begun(monkeypatch):
    """A first launch imports PyTorch, for which a cold disk may take a minute."""
    with pytest.raises(WorkerError, match=r"not done after 0.001 s") as caught:
        launch(waits, timeout=1e-3)
    assert "starting" not in str(caught.value)
    monkeypatch.setattr(watch, "START", 1e-3)
    said = "not begun after 0.001 s. Where each rank stood:\n  rank 0 is still starting\n  rank 1 is still starting"
    with pytest.raises(WorkerError, match=f"^{said}$"):
        launch(int, timeout=1e-4)


def test_a_stack_with_letters_beyond_ascii():
    dump = 'Current thread:\n  File "/새/\\xe9\\u0142\\U0001f600.py", line 7 in \\ud559\n'
    assert watch.frames_of(dump) == [("/새/éł😀.py", "7", "학")]
