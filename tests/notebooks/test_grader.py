"""What all graders share: each names what is missing, one thing at a time, in a line, and never raises. (Stub and solution run under nbval.)"""

import os
import unittest

import pytest
import torch
import torch.distributed as dist

import checks
from checks.grader import alone, grader, launched
from notebooks.scripts import train_ddp
from tests.processes import HURRY


def test_alone_says_what_the_worker_says():
    assert alone(lambda x: x, "this is missing") == "this is missing"
    assert alone(lambda: None) is None
    assert alone(lambda: [].pop()) == "your code raised IndexError: pop from empty list"
    assert alone(lambda: os._exit(0)) == "your code's process exited with status 0 before it was done"
    assert launched(lambda: os._exit(3), nprocs=1) == "rank 0 exited with status 3 before it was done"


@pytest.mark.parametrize("error, said", [
    (ZeroDivisionError("no"), "your code raised ZeroDivisionError: no"),
    (SystemExit("enough"), "your code raised SystemExit: enough"),
    (ValueError(5_000_000 * "x"), " ... (4,998,0"),
])  # fmt: skip
def test_a_grader_never_raises_keeps_to_a_page_and_draws_no_number(says, error, said):
    before = torch.get_rng_state()
    assert len(says(said, grader(raises(error)))) < 2100
    assert torch.equal(before, torch.get_rng_state())


def raises(error):
    def check():
        torch.rand(1)
        raise error

    return check


@pytest.mark.parametrize("check, error", [
    (lambda: None, None),
    (lambda: "look here", "^look here$"),
    (raises(KeyError("of the reader")), "^your code raised KeyError: 'of the reader'$"),
])  # fmt: skip
def test_a_strict_grader_raises_what_it_would_print(capsys, monkeypatch, check, error):
    monkeypatch.setenv("CHECKS", "strict")
    if error is None:
        assert grader(check)() is True
    else:
        with pytest.raises(checks.NotYet, match=error):
            grader(check)()
    assert capsys.readouterr().out == ("" if error else "[passed] well done\n")


def test_what_cannot_run_here_is_skipped(capsys, monkeypatch):
    """Neither passed nor failed: also for who grades a class by pytest or unittest."""
    monkeypatch.delattr(os, "fork")
    why = "this grader kills copies of a process, which needs Linux or macOS: on Windows, use WSL or Colab"
    assert checks.survives(train_ddp.save) is None
    assert capsys.readouterr().out == f"[skipped] {why}\n"
    monkeypatch.setenv("CHECKS", "strict")
    with pytest.raises(checks.Skipped) as raised:
        checks.survives(train_ddp.save)
    assert str(raised.value) == why and isinstance(raised.value, (checks.NotYet, unittest.SkipTest))


def test_launched_says_where_each_rank_stands():
    def worker():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(2), src=1)

    assert launched(worker, timeout=HURRY) == (
        f"after {HURRY} seconds rank 0 waits in recv and rank 1 is done, and waits for the others: "
        "do all ranks call the same collectives?"
    )
