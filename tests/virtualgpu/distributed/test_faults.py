"""A rank that fails, or does not come, while others wait for it: they learn of it, and no process is left."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import virtualgpu
from tests.processes import ranks
from virtualgpu import session
from virtualgpu.distributed import transport
from virtualgpu.distributed.operations import Communicators
from virtualgpu.distributed.shared_clock import LEFT, RAISED
from virtualgpu.run.ranks import WorkerError


def raises():
    raise ValueError("no such label")


def waits_for_one_that(fails, seconds: float, path: str):
    """Rank 1 fails in its way; rank 0 waits for it in a collective, and says what it met."""
    rank = dist.get_rank()
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=seconds))
    x = torch.ones(1000, device=f"cuda:{rank}")
    dist.all_reduce(x, group=group)
    try:
        if rank == 1:
            return fails()
        return dist.all_reduce(x, group=group)
    except dist.DistBackendError as error:
        Path(path).write_text(str(error))
        raise
    finally:  # as programs do
        dist.destroy_process_group()


LATE = r"timed out after 1 s: rank 1 had not come to it.* The limit is new_group\(timeout="


@pytest.mark.parametrize(
    ("fails", "seconds", "culprit", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 8, 1, "rank 1 was killed"),
        (lambda: os._exit(3), 8, 1, "rank 1 "),
        (raises, 8, 1, "no such label"),
        (lambda: torch.empty(1 << 40, device="cuda:1"), 8, 1, "CUDA out of memory"),
        (lambda: time.sleep(30), 1, 0, LATE),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), 1, 0, LATE),
    ],
    ids=["killed", "exits", "raises", "out of memory", "never comes", "stops"],
)
def test_the_one_that_fails_is_named(on_gpus, tmp_path, fails, seconds, culprit, message):
    with pytest.raises(WorkerError, match=message) as caught:
        on_gpus(waits_for_one_that, fails, seconds, str(tmp_path / "met"), timeout=40)
    assert caught.value.rank == culprit
    assert not ranks()
    if fails is raises:
        met = "rank 1 will not come to it: it raised an error, which stands in its own output"
        assert met in (tmp_path / "met").read_text()


@pytest.mark.parametrize(("uncaught", "how"), [(None, LEFT), (OSError("no such text"), RAISED)])
def test_an_error_that_nobody_caught_ends_the_process(monkeypatch, uncaught, how):
    """Python keeps it until the end."""
    virtualgpu.gpus(1)
    left = []
    communicators = Communicators(session.current())
    communicators.known["0", 0] = SimpleNamespace(leave=left.append, messages=None, close=list)
    monkeypatch.setattr(sys, "last_value", uncaught, raising=False)
    communicators.end()
    assert left == [how] and not communicators.known


def returns_before_the_first():
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1 will not come to it: it has returned"):
            dist.all_reduce(torch.ones(1, device="cuda:0"))
    return dist.get_rank()


def test_a_rank_that_has_returned_before_the_first(on_gpus):
    assert on_gpus(returns_before_the_first, timeout=30) == [0, 1]


def late_for_the_first() -> list[str]:
    limit, store = timedelta(seconds=1), dist.distributed_c10d._get_default_store()
    groups = [dist.new_group(backend=backend, timeout=limit) for backend in ("nccl", "nccl", "gloo")]
    calls = dist.all_reduce, lambda x, group: dist.recv(x, 1, group=group), dist.all_reduce
    if dist.get_rank() == 1:
        store.wait(["all have ended"])
        return []
    found = []
    for begin, group in zip(calls, groups, strict=True):
        try:
            begin(torch.ones(1, device="cuda:0"), group=group)
        except RuntimeError as error:
            found.append(str(error))
    store.set("all have ended", "")
    return found


def test_the_first_has_the_limit_of_its_group(on_gpus):
    """Also gloo's, as with a real GPU."""
    found, _ = on_gpus(late_for_the_first, timeout=40)
    assert [message.split(" in group")[0] for message in found] == [
        "all_reduce of rank 0",
        "recv from rank 1 of rank 0",
        "all_reduce of rank 0",
    ]
    assert all("timed out after 1 s: rank 1 had not come" in message for message in found)


def test_a_rank_that_never_comes_to_the_start(tmp_path):
    virtualgpu.gpus(2)
    errors, meet = (dist.DistStoreError, dist.DistNetworkError, RuntimeError), f"file://{tmp_path}/meet"
    with pytest.raises(errors, match=r"(?i)timed? ?out|clients"):
        dist.init_process_group("nccl", init_method=meet, rank=0, world_size=2, timeout=timedelta(seconds=1))
    assert not dist.is_initialized()


def world_after_world(path: str) -> list[float]:
    """As under torchrun, whose store outlives a world."""
    rank, sums = dist.get_rank(), []
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    for _ in range(4):
        dist.init_process_group("nccl", store=dist.PrefixStore("worker", store), rank=rank, world_size=2)
        x = torch.ones(1, device=f"cuda:{rank}")
        dist.all_reduce(x)
        sums.append(x.item())
        dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.PrefixStore("last", store), rank=rank, world_size=2)
    return sums


def test_a_world_is_made_anew_in_the_same_store(on_gpus, tmp_path):
    assert on_gpus(world_after_world, str(tmp_path / "store")) == [[2.0] * 4] * 2


def test_the_end_waits_until_no_thread_of_gloo_holds_a_tensor():
    """It needs the interpreter to let go: one that had ended took its rank with it, once in some thousand."""
    virtualgpu.gpus(1)
    holds = threading.Event()

    def keep(held):
        transport.hold(held)
        holds.set()
        time.sleep(0.3)

    threading.Thread(target=keep, args=[[torch.ones(3)]]).start()
    holds.wait()
    assert transport.HELD[-1]() is not None
    Communicators(session.current()).forget()
    assert transport.HELD[-1]() is None
    kept = [torch.ones(3)]  # what gloo never lets go of is not waited for
    transport.hold(kept)
    transport.let_go(seconds=0.1)
    assert transport.HELD[-1]() is kept[0]
