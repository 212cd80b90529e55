"""A rank that fails while others wait for it: they learn of it, and no process is left."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import virtualgpu
from tests.processes import ranks
from virtualgpu import session
from virtualgpu.distributed import transport
from virtualgpu.distributed.process_group import Communicators
from virtualgpu.distributed.shared_clock import LEFT, RAISED
from virtualgpu.run.ranks import WorkerError


def waits_for_one_that(fails, seconds: float = 8):
    """Rank 1 fails in its way; rank 0 waits for it in a collective, and says what it met and after how long."""
    from datetime import timedelta

    import torch.distributed as dist

    rank = dist.get_rank()
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=seconds))
    x = torch.ones(1000, device=f"cuda:{rank}")
    dist.all_reduce(x, group=group)
    if rank == 1:
        return fails()
    begin = time.monotonic()
    try:
        dist.all_reduce(x, group=group)
    except dist.DistBackendError as error:
        said = f"{error}"
    raise RuntimeError(f"after {time.monotonic() - begin:.1f} s: {said}")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def exits():
    os._exit(3)


def raises():
    raise ValueError("no such label")


def out_of_memory():
    torch.empty(1 << 40, device="cuda:1")


def never_comes():
    time.sleep(30)


def stops():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (killed, "rank 1 was killed"),
        (exits, "rank 1 "),
        (raises, "no such label"),
        (out_of_memory, "CUDA out of memory"),
    ],
)
def test_the_one_that_fails_is_named(on_gpus, fails, words):
    with pytest.raises(WorkerError, match=words) as caught:
        on_gpus(waits_for_one_that, fails, timeout=40)
    assert caught.value.rank == 1
    assert not ranks()


@pytest.mark.parametrize("fails", [never_comes, stops])
def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(on_gpus, fails):
    words = r"timed out after 1 s: rank 1 had not come to it.* The limit is new_group\(timeout="
    with pytest.raises(WorkerError, match=words) as caught:
        on_gpus(waits_for_one_that, fails, 1, timeout=40)
    assert caught.value.rank == 0
    assert not ranks()


def raises_and_destroys(path: str):
    """As programs do in `finally`."""
    import torch.distributed as dist

    rank = dist.get_rank()
    x = torch.ones(1, device=f"cuda:{rank}")
    dist.all_reduce(x)
    try:
        if rank == 1:
            raises()
        dist.all_reduce(x)
    except dist.DistBackendError as error:
        Path(path).write_text(str(error))
    finally:
        dist.destroy_process_group()


def test_a_rank_that_raised_is_told_of_as_such(on_gpus, tmp_path):
    with pytest.raises(WorkerError, match="no such label"):
        on_gpus(raises_and_destroys, str(tmp_path / "said"), timeout=40)
    words = "rank 1 will not come to it: it raised an error, which stands in its own output"
    assert words in (tmp_path / "said").read_text()


@pytest.mark.parametrize(("uncaught", "how"), [(None, LEFT), (OSError("no such text"), RAISED)])
def test_an_error_that_nobody_caught_ends_the_process(monkeypatch, uncaught, how):
    """Python keeps it until the end."""
    virtualgpu.gpus(1)
    left = []
    communicators = Communicators(session.current())
    communicators.known["0", 0] = SimpleNamespace(leave=left.append, messages=None)
    monkeypatch.setattr(sys, "last_value", uncaught, raising=False)
    communicators.end()
    assert left == [how] and not communicators.known


def mismatched():
    import torch.distributed as dist

    rank = dist.get_rank()
    x = torch.ones(4, device=f"cuda:{rank}")
    group = dist.new_group(backend="nccl")
    said = []
    try:
        dist.all_reduce(x, group=group) if rank else dist.broadcast(x, 0, group=group)
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_ranks_that_call_different_collectives(on_gpus):
    zero, one = on_gpus(mismatched)
    broadcast, reduce = "broadcast of 4 float32 from rank 0", "all_reduce of 4 float32 (sum)"
    assert f"rank 0 came to {broadcast} where rank 1 came to {reduce}, in group" in zero[0]
    assert f"rank 1 came to {reduce} where rank 0 came to {broadcast}, in group" in one[0]


def waits_in_gloo_for_one_that_does_not_come() -> str:
    from datetime import timedelta

    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["has ended"])
        return ""
    try:
        dist.all_reduce(torch.ones(1, device="cuda:0"), group=group)
    except RuntimeError as error:
        return f"{error}"
    finally:
        store.set("has ended", "")


def test_gloo_waits_for_a_gpus_tensors_no_longer_than_its_timeout(on_gpus):
    """As with a real GPU: gloo's own error comes after so many seconds."""
    assert (
        "timed out after 1 s: rank 1 had not come" in on_gpus(waits_in_gloo_for_one_that_does_not_come, timeout=40)[0]
    )


def test_a_rank_that_never_comes_to_the_start(tmp_path):
    import torch.distributed as dist

    virtualgpu.gpus(2)
    from datetime import timedelta

    with pytest.raises((dist.DistStoreError, dist.DistNetworkError, RuntimeError), match=r"(?i)timed? ?out|clients"):
        dist.init_process_group(
            "nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=2, timeout=timedelta(seconds=1)
        )
    assert not dist.is_initialized()


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


def test_what_gloo_never_lets_go_of_is_not_waited_for():
    kept = [torch.ones(3)]
    transport.hold(kept)
    transport.let_go(seconds=0.1)
    assert transport.HELD[-1]() is kept[0]
