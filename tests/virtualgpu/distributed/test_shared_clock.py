"""Messages whose sender has gone, or whose group is destroyed, before the receiver looks; and the page that ranks share."""

import gc
import os
import tempfile
import time
from datetime import timedelta

import pytest

from tests.processes import ranks
from virtualgpu.distributed.message_log import RECV, SEND, MessageLog
from virtualgpu.distributed.shared_clock import SLOTS, Arrivals, RankEnded, RankLate


class Store(dict):
    """What Arrivals.meet uses of a store, in one process."""

    set = dict.__setitem__

    def get(self, key: str) -> bytes:
        return self[key].encode()

    def add(self, key: str, amount: int) -> int:
        self[key] = self.setdefault(key, 0) + amount
        return self[key]


def pages(folder) -> list[Arrivals]:
    store = Store()
    return [Arrivals.meet(store, rank, 2, str(folder)) for rank in range(2)]


def soon(seconds: float = 0.2) -> tuple[float, timedelta]:
    return time.monotonic() + seconds, timedelta(seconds=seconds)


def test_what_a_rank_wrote_is_read_also_when_it_has_ended(tmp_path):
    zero, one = pages(tmp_path)
    assert not list(tmp_path.iterdir())  # the file is theirs alone as soon as both have it
    first, second = MessageLog(zero), MessageLog(one)
    many = [(SEND, 1, nbytes) for nbytes in range(200)]  # more than is looked at at once
    for batch in (many, [(SEND, 1, 0)], [(RECV, 1, 5), (SEND, 1, 7)]):
        first.write(1.5, -1, batch)
    one._page[1] = 2**30  # rank 0 is of a process that is not there
    assert [second.batch_of(0, SEND, 1, index, *soon()) for index in (0, 199, 200, 201)] == [0, 0, 1, 2]
    assert second.batch_of(0, RECV, 1, 0, *soon()) == 2
    read = second.batches[0]
    assert [message.nbytes for message in read[0].messages] == list(range(200)) and read[0].issued == 1.5
    assert read[2].messages[1].nth == 201 and len(read) == 3
    with pytest.raises(RankEnded):
        second.batch_of(0, SEND, 1, 202, *soon(20))


def late_receiver(folder):
    """Rank 0 sends and destroys its groups; rank 1 looks a second later. What they share is in this folder."""
    import torch
    import torch.distributed as dist

    tempfile.tempdir = folder
    rank = dist.get_rank()
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=5))
    x = torch.full((4,), float(1 + rank), device=f"cuda:{rank}")
    dist.barrier(group=group)
    if rank == 0:
        dist.send(x, 1, group=group)
    else:
        work = dist.irecv(x, 0, group=group)
        time.sleep(1)
        work.wait()
    found = x.device.index, x.tolist()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("dry", [False, True])
def test_a_destroyed_group_keeps_what_was_sent(on_gpus, tmp_path, dry):
    _, (device, values) = on_gpus(late_receiver, str(tmp_path), dry=dry, timeout=30)
    assert device == 1 and (dry or values == [1.0] * 4)
    assert not list(tmp_path.iterdir())
    assert not ranks()


def test_a_page_leaves_no_open_file(tmp_path, recwarn):
    """Neither a number of the system's, nor a warning of Python's, nor a name where not all ranks come."""
    before = len(os.listdir("/proc/self/fd"))
    mine = Arrivals.meet(Store(), 0, 2, str(tmp_path))
    assert list(tmp_path.iterdir())
    mine.unname()
    assert not list(tmp_path.iterdir())
    del mine
    pages(tmp_path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


def test_a_rank_may_be_many_collectives_ahead(tmp_path):
    """But no further than its page remembers; each is read as it was told."""
    (zero, one), limit = pages(tmp_path), timedelta(seconds=0.05)
    for number in range(1, SLOTS + 1):
        assert zero.post(number, 0.5 * number, (number, 2, 3, 4), limit) == []
    with pytest.raises(RankLate):
        zero.post(SLOTS + 1, 0.0, (0, 0, 0, 0), limit)
    for number in range(1, SLOTS + 1):
        assert one.post(number, 7.0, (number, 0, 0, 0), limit) == [(0, (number, 2, 3, 4))]
        for page in (zero, one):
            assert page.read(number, limit) == (max(7.0, 0.5 * number), [(number, 2, 3, 4), (number, 0, 0, 0)])
    zero.post(SLOTS + 1, 1.0, (0, 0, 0, 0), limit)
    with pytest.raises(RankLate, match="rank 1 had not come"):
        zero.read(SLOTS + 1, limit)
