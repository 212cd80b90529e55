"""What ranks print comes back, whatever way they print it; and where each rank stands at the time limit."""

import io
import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.processes import HURRY
from virtualgpu.run.ranks import WorkerError, launch, watch


@pytest.fixture
def lines(capsys):
    """lines(): what was printed since, line by line."""
    return lambda: capsys.readouterr().out.splitlines()


def test_a_last_line_without_an_end(lines):
    launch(lambda: print("first\nlast", end=""), nprocs=1)
    assert lines() == ["[rank 0] first", "[rank 0] last"]


def test_words_before_an_error(lines):
    def worker():
        print("one ...", end="")
        raise ValueError

    with pytest.raises(WorkerError):
        launch(worker, nprocs=1)
    assert lines() == ["[rank 0] one ..."]


def test_words_before_a_sudden_end(lines):
    def worker():
        print("one ...", end="", flush=True)
        os._exit(1)

    with pytest.raises(WorkerError, match="exited with status 1"):
        launch(worker, nprocs=1)
    assert lines() == ["[rank 0] one ..."]


def test_a_line_of_many_megabytes(lines):
    launch(lambda: print("é" * 5_000_000, end=""), nprocs=1)
    (line,) = lines()
    assert line == "[rank 0] " + "é" * 5_000_000


def test_stdout_is_a_stream_like_others(lines):
    def worker():
        sys.stdout.writelines(["a\n", "b\n"])
        sys.stdout.flush()
        sys.stdout.buffer.write("é, as bytes\n".encode())
        print("to stderr", file=sys.stderr)
        print("half of a pair: \udc80")
        subprocess.run(["true"], stdout=sys.stdout, check=True)
        found = sys.stdout.isatty(), sys.stdout.writable(), sys.stdout.fileno() >= 0, sys.stdout.encoding
        sys.stdout.close()
        return found

    assert launch(worker, nprocs=1) == [(False, True, True, "utf-8")]
    said = ["a", "b", "é, as bytes", "to stderr", "half of a pair: \\udc80"]
    assert lines() == [f"[rank 0] {line}" for line in said]


def test_threads_do_not_mix_their_lines(lines):
    def worker():
        def write(letter):
            for _ in range(50):
                sys.stdout.write(letter * 60_000 + "\n")

        threads = [threading.Thread(target=write, args=letter) for letter in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    launch(worker, nprocs=1)
    assert sorted(lines()) == [f"[rank 0] {letter * 60_000}" for letter in "abc" for _ in range(50)]


class Talking:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        print("item", index, "." * 1000)
        return index


def test_a_loaders_workers_do_not_mix_theirs(lines):
    from torch.utils.data import DataLoader

    launch(lambda: list(DataLoader(Talking(), num_workers=2)), nprocs=1)
    assert sorted(lines()) == sorted(f"[rank 0] item {index} {'.' * 1000}" for index in range(40))


def test_a_notebook_that_prints_ascii_alone(monkeypatch):
    """As in the C locale: the result must not be lost for a letter."""
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, "ascii", line_buffering=True))
    assert launch(lambda: print("caf\u00e9") or 7, nprocs=1) == [7]
    assert content.getvalue() == b"[rank 0] caf\\xe9\n"


# -- where each rank stands


def places(worker, timeout=HURRY):
    with pytest.raises(WorkerError) as caught:
        launch(worker, timeout=timeout)
    assert caught.value.rank is None
    first, *found = str(caught.value).splitlines()
    assert first == f"not done after {timeout:g} s (the timeout). Where each rank stood:"
    assert [place.strip() for place in found] == caught.value.places
    return caught.value.places


def test_a_rank_that_hangs_ends_at_the_time_limit():
    def waits_for_nobody():
        if dist.get_rank() == 0:
            dist.recv(torch_ones(), src=1)
        else:
            time.sleep(60)

    zero, one = places(waits_for_nobody)
    assert "rank 0 stands in line" in zero and zero.endswith("in waits_for_nobody, which waits in recv")
    assert "rank 1 stands in line" in one and one.endswith("in waits_for_nobody")


def torch_ones():
    import torch

    return torch.ones(1)


def test_lines_of_python_itself_are_not_the_readers():
    def worker():
        threading.Event().wait()

    line = worker.__code__.co_firstlineno + 1
    assert places(worker) == [f"rank {rank} stands in line {line}, in worker, which waits in wait" for rank in (0, 1)]


def test_the_limit_begins_when_all_ranks_have_begun():
    """A first launch imports PyTorch, for which a cold disk may take a minute."""
    assert not any("starting" in place for place in places(lambda: time.sleep(60), 1e-3))


def test_ranks_that_do_not_begin(monkeypatch):
    monkeypatch.setattr(watch, "START", 1e-3)
    said = "not begun after 0.001 s. Where each rank stood:\n  rank 0 is still starting\n  rank 1 is still starting"
    with pytest.raises(WorkerError, match=f"^{said}$"):
        launch(int, timeout=1e-4)


def one_leaves_early():
    if dist.get_rank() == 1:
        dist.recv(torch_ones(), src=0)


def test_a_rank_that_is_done_says_so():
    zero, one = places(one_leaves_early)
    assert zero == "rank 0 is done, and waits for the others"
    assert one.startswith("rank 1 stands in line") and one.endswith("in one_leaves_early, which waits in recv")


def test_a_stack_with_letters_beyond_ascii():
    dump = 'Current thread:\n  File "/새/\\xe9\\u0142\\U0001f600.py", line 7 in \\ud559\n'
    assert watch.frames_of(dump) == [("/새/éł😀.py", "7", "학")]
