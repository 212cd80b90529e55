"""Messages that would end a process (elements that share memory, two sides of different sizes), and those that wait for each other."""

import re
import time
from datetime import timedelta

import pytest
import torch

from virtualgpu.run.ranks import WorkerError


def expanded():
    """Four numbers that say to be 4000, as a mask that was broadcast."""
    import torch.distributed as dist

    device = torch.device("cuda", dist.get_rank())
    if dist.get_rank() == 0:
        dist.send(torch.arange(1.0, 5.0, device=device).unsqueeze(1).expand(4, 1000), 1)
        return None
    received = torch.empty_strided((4, 1000), (1, 0), device=device)
    beside = torch.full((4000,), 7.0, device=device)
    dist.recv(received, 0)
    return received[:, ::999].tolist(), beside.unique().tolist()


def test_elements_that_share_memory_travel_once(on_gpus):
    assert on_gpus(expanded)[1] == ([[n, n] for n in (1.0, 2.0, 3.0, 4.0)], [7.0])


def two_sizes():
    import torch.distributed as dist

    device = torch.device("cuda", dist.get_rank())
    if dist.get_rank() == 0:
        dist.send(torch.ones(100_000, device=device), 1)
    else:
        dist.recv(torch.zeros(10, device=device), 0)


def test_two_sizes_are_an_error_of_python(on_gpus):
    with pytest.raises(WorkerError, match="rank 0 sends 400000 bytes where rank 1 receives 40: give both a tensor"):
        on_gpus(two_sizes)


def to_itself():
    """As the last rank of a V-shaped pipeline does, which has two stages in a row."""
    import torch.distributed as dist

    group, device = dist.group.WORLD, torch.device("cuda", dist.get_rank())
    given, taken = torch.arange(3.0, device=device), torch.zeros(3, device=device)
    with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as both:
        group.recv([taken], dist.get_rank(), 0)
        group.send([given], dist.get_rank(), 0)
    both.wait()
    return taken.tolist()


def test_a_rank_may_send_to_itself(on_gpus):
    assert on_gpus(to_itself) == [[0.0, 1.0, 2.0]] * 2


def called(ways: list[str], numbers: list[int], warm: bool, one_after_another: bool = False) -> list[str]:
    """What each of these ways to send to the next rank and receive from the one before comes to, each in a group of its own. warm: after
    a message in each direction, so that NCCL has connected both ends."""
    import torch.distributed as dist

    rank, size, said = dist.get_rank(), dist.get_world_size(), []
    following, before = (rank + 1) % size, (rank - 1) % size
    torch.cuda.set_device(rank)
    for way in ways:
        for count in numbers:
            group = dist.new_group(backend="nccl", timeout=timedelta(seconds=20))
            mine, theirs = torch.full((count,), 1.0 + rank, device="cuda"), torch.zeros(count, device="cuda")
            for sender in range(size) if warm else ():
                for other in {(sender + 1) % size, (sender - 1) % size}:
                    if rank in (sender, other):
                        (dist.send if rank == sender else dist.recv)(theirs[:1], sender + other - rank, group=group)
            begin = time.monotonic()
            try:
                WAYS[way](dist, mine, theirs, following, before, group)
                said.append(f"from {int(theirs[0]) - 1}")
            except dist.DistBackendError as error:
                said.append(str(error))
            assert time.monotonic() - begin < 10, said[-1]
    dist.barrier()  # nobody leaves while another one still looks
    return said


def send_first(dist, mine, theirs, following, before, group):
    dist.send(mine, following, group=group)
    dist.recv(theirs, before, group=group)


def isend_first(dist, mine, theirs, following, before, group):
    sending = dist.isend(mine, following, group=group)
    dist.recv(theirs, before, group=group)
    sending.wait()


def receive_first(dist, mine, theirs, following, before, group):
    dist.recv(theirs, before, group=group)
    dist.send(mine, following, group=group)


def irecv_first(dist, mine, theirs, following, before, group):
    works = [dist.irecv(theirs, before, group=group), dist.isend(mine, following, group=group)]
    for work in works:
        work.wait()


def on_a_stream(dist, mine, theirs, following, before, group):
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.send(mine, following, group=group)
    dist.recv(theirs, before, group=group)


def batched(dist, mine, theirs, following, before, group):
    sends, takes = dist.P2POp(dist.isend, mine, following, group), dist.P2POp(dist.irecv, theirs, before, group)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()


def batches(dist, mine, theirs, following, before, group):
    for way, tensor, peer in ((dist.isend, mine, following), (dist.irecv, theirs, before)):
        for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, peer, group)]):
            work.wait()


def as_objects(dist, mine, theirs, following, before, group):
    found = [None]
    dist.send_object_list([mine[:1].tolist()], following, group)
    dist.recv_object_list(found, before, group)
    theirs[0] = found[0][0]


def eight(dist, mine, theirs, following, before, group):
    for _ in range(8):
        dist.send(mine, following, group=group)
    for _ in range(8):
        dist.recv(theirs, before, group=group)


def nine(dist, mine, theirs, following, before, group):
    dist.send(mine, following, group=group)
    eight(dist, mine, theirs, following, before, group)


FUNCTIONS = (
    send_first,
    isend_first,
    receive_first,
    irecv_first,
    on_a_stream,
    batched,
    batches,
    as_objects,
    eight,
    nine,
)
WAYS = {function.__name__: function for function in FUNCTIONS}
SMALL, LARGE = 1_000, 1 << 20  # numbers of 4 bytes; the buffer between two T4 holds 1 MiB
SENDS = r"both ranks send first, and NCCL would hang: (rank \d sends {size} bytes to rank \d{on}[,;] ){{2}}"
TAKES = r"both ranks receive first, and NCCL would hang: (rank \d receives from rank \d[,.] ){{2}}Let one of them send first"
CONNECTS = SENDS + "the first message of a direction connects its sender with its receiver"
WAITS = SENDS + "a message of more than 1 MiB leaves its sender when the receiver has come to it. Use batch_isend_irecv"
FULL = SENDS + "NCCL's buffer has room for 8 small messages that nobody has received"
COLD = {"send_first": CONNECTS, "isend_first": CONNECTS, "receive_first": TAKES, "irecv_first": TAKES, "on_a_stream": CONNECTS,
        "batched": "", "batches": CONNECTS, "as_objects": CONNECTS}  # fmt: skip
WARM = {"send_first": "", "isend_first": "", "receive_first": TAKES, "irecv_first": TAKES, "on_a_stream": "", "batched": "",
        "batches": "", "as_objects": "", "eight": "", "nine": FULL}  # fmt: skip
BIG = {"send_first": WAITS, "isend_first": WAITS, "receive_first": TAKES, "irecv_first": TAKES, "on_a_stream": WAITS, "batched": "",
       "batches": WAITS}  # fmt: skip


@pytest.mark.parametrize(("expected", "count", "warm"), [(COLD, SMALL, False), (WARM, SMALL, True), (BIG, LARGE, True)])
def test_messages_that_wait_for_each_other_are_told_at_once(on_gpus, expected, count, warm):
    """And those that NCCL's buffer has room for go through."""
    for rank, said in enumerate(on_gpus(called, list(expected), [count], warm, timeout=60)):
        for (way, words), found in zip(expected.items(), said, strict=True):
            on, size = (r" on stream \d+" if way == "on_a_stream" else ""), f"{4 * count:,}"
            words = words.format(size=size if way != "as_objects" else 8, on=on) or f"^from {1 - rank}$"
            assert re.search(words, found), (way, found)


@pytest.mark.parametrize(("warm", "words"), [(False, "ranks 0, 1, 2 send first, and NCCL would hang"), (True, "from ")])
def test_a_ring_of_three_that_send_first(on_gpus, warm, words):
    for (small,) in on_gpus(called, ["send_first"], [SMALL], warm, n=3, timeout=60):
        assert words in small
