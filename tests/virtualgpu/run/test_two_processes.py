"""Two processes that ask for the last memory of one GPU in the same moment: one has it, the other is out of memory."""

import contextlib
import json
import multiprocessing
import time

import pytest
import torch

import virtualgpu
from virtualgpu.memory.allocator import CachingAllocator
from virtualgpu.memory.config import parse
from virtualgpu.memory.ledger import Ledger
from virtualgpu.run.ranks import launch

GIB = 1 << 30
ROUNDS = 12
fork = multiprocessing.get_context("fork")


def takes(folder: str, settings: str, barrier, found) -> None:
    """One of the two: in each round it asks for 6 of 10 GiB."""
    ledger = Ledger(folder, 1)

    def others() -> int:
        held = ledger.others(0)
        time.sleep(0.02)  # so long that the other one asks, too
        return held

    memory = CachingAllocator(10 * GIB, others=others, config=parse(settings))
    memory.exclusive = ledger.lock
    memory.on_reserved = lambda memory: ledger.note(0, memory.reserved + memory.context)
    got = []
    for _ in range(ROUNDS):
        barrier.wait(30)
        block = None
        with contextlib.suppress(torch.OutOfMemoryError):
            block = memory.malloc(6 * GIB)
        got.append(block is not None)
        barrier.wait(30)
        memory.free(block)
        memory.empty_cache()
    found.put(got)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_one_of_two_allocators_gets_the_last_memory(tmp_path, settings):
    barrier, found = fork.Barrier(2), fork.Queue()
    both = [fork.Process(target=takes, args=(str(tmp_path), settings, barrier, found)) for _ in range(2)]
    for process in both:
        process.start()
    rounds = list(zip(found.get(timeout=60), found.get(timeout=60), strict=True))
    for process in both:
        process.join()
    assert rounds and all(map(sum, rounds)) and not any(map(all, rounds))


PROGRAM = """
import json, multiprocessing, sys, torch
fork = multiprocessing.get_context("fork")

def takes(barrier, found):
    got = []
    for _ in range(40):
        barrier.wait(30)
        try:
            held = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            held = None
        got.append(held is not None)
        barrier.wait(30)
        del held
        torch.cuda.empty_cache()
    found.put(got)

barrier, found = fork.Barrier(2), fork.Queue()
both = [fork.Process(target=takes, args=(barrier, found)) for _ in range(2)]
for process in both:
    process.start()
print(json.dumps([found.get(timeout=60) for _ in both]))
for process in both:
    process.join()
"""


def test_two_processes_under_the_runner(run, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("--gpus", 1, "--memory", "10GB", "--dry", tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    rounds = list(zip(*json.loads(done.stdout), strict=True))
    assert rounds and all(map(sum, rounds)) and not any(map(all, rounds))


def test_two_ranks_of_launch(monkeypatch):
    def takes():
        from torch import distributed as dist

        got = []
        for _ in range(40):
            dist.barrier()
            try:
                held = torch.empty(6 << 30, dtype=torch.uint8, device="cuda:0")
            except torch.OutOfMemoryError:
                held = None
            got.append(held is not None)
            dist.barrier()
            del held
            torch.cuda.empty_cache()
        return got

    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    virtualgpu.gpus(1, memory="10 GB")
    try:
        rounds = list(zip(*launch(takes, nprocs=2, dry=True), strict=True))
    finally:
        virtualgpu.reset()
    assert rounds and all(map(sum, rounds)) and not any(map(all, rounds))


def test_ranks_draw_numbers_of_their_own():
    """As processes that are started anew do; forked from one that has PyTorch loaded, they would have its seed."""

    def draws():
        import numpy

        return torch.rand(1).item(), numpy.random.rand(), torch.initial_seed()

    ranks = [numbers for _ in range(2) for numbers in launch(draws, nprocs=2)]
    assert [len(set(numbers)) for numbers in zip(*ranks, strict=True)] == [4, 4, 4]
