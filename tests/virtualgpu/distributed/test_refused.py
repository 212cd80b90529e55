"""What NCCL refuses or hangs in, as errors: of one rank, of ranks that do not mean the same, of messages that wait for each other."""

import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import virtualgpu
from tests.virtualgpu.distributed.conftest import Rows
from virtualgpu.run.ranks import WorkerError

TWO, DRY, THREE = Rows(), Rows(dry=True), Rows(3)

# -- one rank


def rooted(options, root):
    options.rootRank = root
    return options


INVALID_ROOT = (
    r"^NCCL error in: .*, invalid argument \(run with NCCL_DEBUG=WARN for details\), NCCL version 2\..*\n"
    r"ncclInvalidArgument: Invalid value for an argument\.\nLast error:\n{} : invalid root {} \(root should be in the 0\.\.1 range\)$"
)
FP8, FP8_UZ = torch.float8_e4m3fn, torch.float8_e5m2fnuz
REFUSED = [
    (lambda g, x: g._allgather_base(x.repeat(3), x), ValueError, "output tensor size must be equal to world_size"),
    (lambda g, x: g._allgather_base(x.int(), x), TypeError, "output tensor must have the same type as input tensor"),
    (lambda g, x: g._reduce_scatter_base(x, x.repeat(3)), ValueError, "input tensor must be the same size as output"),
    (lambda g, x: g._reduce_scatter_base(x.int(), x), TypeError, "input tensor must be the same type as the output"),
    (lambda g, x: g.gather([[x]], [x], rooted(dist.GatherOptions(), -1)), ValueError, "invalid root rank: -1"),
    (lambda g, x: g.scatter([x], [[x]], rooted(dist.ScatterOptions(), 1)), ValueError, "invalid root rank: 1"),
    (lambda g, x: g.gather([[x, x]], [x], rooted(dist.GatherOptions(), 0)), ValueError, "Incorrect output list size 2"),
    (lambda g, x: g.scatter([x], [[x[:1]]], rooted(dist.ScatterOptions(), 0)), ValueError, r"0 \(expected \(4\), got \(1\)\)"),
    (lambda g, x: g.gather([[x]], [], rooted(dist.GatherOptions(), 0)), RuntimeError, "There were no tensor arguments"),
    (lambda g, x: g.allreduce([x + 1j], dist.ReduceOp.MAX), RuntimeError, "does not support MAX on complex tensors"),
    (lambda g, x: dist.all_reduce(x.to_sparse()), RuntimeError, "NCCL does not support all_reduce with sparse tensors"),
    (lambda g, x: dist.broadcast(x.to_sparse(), 0), ValueError, "Tensors must be CUDA and dense"),
    (lambda g, x: dist.all_reduce(torch.ones(2, 3, device="cuda").t()), ValueError, "Tensors must be contiguous"),
    (lambda g, x: dist.all_reduce(x[::2]), ValueError, "Tensors must be contiguous"),
    (lambda g, x: dist.all_reduce(x.cpu()), RuntimeError, "No backend type associated with device type cpu"),
    (lambda g, x: dist.all_reduce(x.int(), dist.ReduceOp.BXOR), ValueError, "Cannot use ReduceOp.BXOR with NCCL"),
    (lambda g, x: dist.all_reduce(x.bool(), dist.ReduceOp.AVG), TypeError, "Cannot use ReduceOp.AVG with boolean inputs"),
    (lambda g, x: dist.all_reduce(x.to(FP8_UZ)), RuntimeError, "Unsupported Float8 type for NCCL reduction"),
    (lambda g, x: dist.all_reduce(x.to(FP8)), dist.DistBackendError, "FP8 reduction support begins with sm90"),
    (lambda g, x: dist.monitored_barrier(), ValueError, "monitored_barrier"),
    (lambda g, x: dist.recv(x), RuntimeError, "recv from any source is not there with NCCL"),
    # in the words of an H100 with PyTorch 2.11
    (lambda g, x: dist.all_reduce(x.short()), TypeError, "^Input .* not supported for NCCL process group: Short$"),
    (lambda g, x: dist.broadcast(x.to(torch.uint16), 0), TypeError, "for NCCL process group: UInt16$"),
    (lambda g, x: dist.all_to_all_single(x.short(), x.short()), RuntimeError, "^Unconvertible NCCL type Short$"),
    (lambda g, x: g.broadcast(x, 1), dist.DistBackendError, INVALID_ROOT.format("Broadcast", 1)),
    (lambda g, x: dist.reduce(x, 5), dist.DistBackendError, INVALID_ROOT.format("Reduce", 5)),
]  # fmt: skip


def test_refused(alone):
    x = torch.ones(4, device="cuda")
    for wrong, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            wrong(alone, x)
    dist.all_reduce(x)  # nothing of them is left behind
    assert x.tolist() == [1] * 4


def test_a_group_for_cpu_tensors_alone_takes_no_gpus():
    """As on an H100."""
    virtualgpu.gpus(1, like="T4")
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"^No backend type associated with device type cuda$"):
            dist.all_reduce(torch.ones(2, device="cuda"))
    finally:
        dist.destroy_process_group()


def test_ranks_that_are_threads():
    """PyTorch's tests have such a group, written in Python: what it makes is on the GPU of what it was given."""
    from torch.testing._internal.distributed import multi_threaded_pg

    virtualgpu.gpus(2, like="T4")
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, found = dist.HashStore(), {}

    def rank(number):
        dist.init_process_group("threaded", rank=number, world_size=2, store=store)
        mine = torch.full((2,), 1.0 + number, device=number)
        total = functional.all_reduce(mine, "sum", dist.group.WORLD) + 0  # waits for it
        dist.broadcast(mine, 0)
        found[number] = total.device.index, total.tolist(), mine.device.index, mine.tolist()
        if hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # PyTorch 2.11 itself raises without
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert found == {number: (number, [3, 3], number, [1, 1]) for number in range(2)}


@TWO.row
def two_on_one_gpu() -> list[str]:
    torch.cuda.set_device(0)
    dist.barrier()  # on the GPU of the rank's number, as ProcessGroupNCCL guesses
    group, found = dist.new_group(backend="nccl"), []
    for call in (lambda: dist.all_reduce(torch.ones(1, device="cuda"), group=group), lambda: dist.barrier(group)):
        try:
            call()
        except dist.DistBackendError as error:
            found.append(str(error))
    torch.cuda.set_device(dist.get_rank())  # the cure that it names
    for mended in (group, dist.new_group(backend="nccl")):
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x, group=mended)
        dist.barrier(mended)
        found.append(x.item())
    return found


def test_nccl_takes_one_gpu_for_each_rank():
    for message, again, *mended in TWO[two_on_one_gpu]:
        assert "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 00000000:01:00.0" in message
        assert "torch.cuda.set_device" in message
        assert again == message and mended == [2.0, 2.0]  # a second communicator, once the cause is gone


# -- ranks whose collectives differ: both are named, and no process ends by a signal. Nothing of NCCL compares them


def lists_of(y, rank):
    return None if rank else [y.clone(), y.clone()]


def several(rank, x, y, group):
    with dist._coalescing_manager(group=group, device=x.device):
        for size in (2, 6) if rank else (4, 4):
            dist.all_reduce(torch.ones(size, device=x.device), group=group)


def splits(rank, x, y, group):
    takes, gives = ([2, 2], [3, 2]) if rank else ([1, 3], [1, 3])
    dist.all_to_all_single(x.new_empty(sum(takes)), x.new_ones(sum(gives)), takes, gives, group=group)


def lists(rank, x, y, group):
    dist.all_gather([x.clone(), x.clone()], x[:2].clone() if rank else x, group=group)


SUM = "all_reduce of 4 float32 (sum)"
UNLIKE = [  # what a rank calls with 4 numbers x and, y, 4 or 6 of them; what ranks 0 and 1 are said to have come to
    (lambda r, x, y, g: dist.all_reduce(y, group=g), SUM, "all_reduce of 6 float32 (sum)"),
    (lambda r, x, y, g: dist.all_reduce(x.int() if r else x, group=g), SUM, "all_reduce of 4 int32 (sum)"),
    (lambda r, x, y, g: dist.all_reduce(x, dist.ReduceOp.MAX if r else dist.ReduceOp.SUM, g), SUM, "all_reduce of 4 float32 (max)"),
    (lambda r, x, y, g: dist.broadcast(x, r, g), "broadcast of 4 float32 from rank 0", "broadcast of 4 float32 from rank 1"),
    (lambda r, x, y, g: dist.broadcast(x, 0, g) if r else dist.all_reduce(x, group=g), SUM, "broadcast of 4 float32 from rank 0"),
    (lambda r, x, y, g: dist.all_reduce(x, group=g) if r else dist.barrier(g, device_ids=[0]), "barrier", SUM),
    (lambda r, x, y, g: dist.all_gather_into_tensor(y.repeat(2), y, g), "all_gather of 4 float32", "all_gather of 6 float32"),
    (lambda r, x, y, g: dist.reduce_scatter_tensor(y, y.repeat(2), group=g), "reduce_scatter of 4 float32 (sum)", "reduce_scatter of 6 float32 (sum)"),
    (lambda r, x, y, g: dist.gather(y, lists_of(y, r), 0, g), "gather of 4 float32 to rank 0", "gather of 6 float32 to rank 0"),
    (lambda r, x, y, g: dist.scatter(y, lists_of(y, r), 0, g), "scatter of 4 float32 from rank 0", "scatter of 6 float32 from rank 0"),
    (several, "all_reduce of 2 tensors with 8 float32 (sum)", "all_reduce of 2 tensors with 8 float32 (sum) in other sizes or dtypes"),
    (lists, "all_gather and takes 4 float32 from rank 1", "all_gather and gives it 2"),
    (splits, "all_to_all and gives rank 1 3 float32", "all_to_all and takes 2 from it"),
]  # fmt: skip


@DRY.row
@TWO.row
def all_unlike() -> list[str]:
    rank, found = dist.get_rank(), []
    x = torch.ones(4, device=f"cuda:{rank}")
    for call, *_ in UNLIKE:
        group, message = dist.new_group(backend="nccl"), ""
        for _ in range(2):  # the second time nothing begins
            try:
                call(rank, x, torch.ones(6, device=x.device) if rank else x, group)
                torch.cuda.synchronize()
                message = "no error"
            except dist.DistBackendError as error:
                message = message or str(error)
        found.append(message)
    return found


@pytest.mark.parametrize("ranks", [TWO, DRY], ids=["with numbers", "dry"])
def test_ranks_that_call_unlike_collectives_are_named(ranks):
    zero, one = ranks[all_unlike]
    for (call, first, second), here, there in zip(UNLIKE, zero, one, strict=True):
        assert f"rank 0 came to {first} where rank 1 came to {second}" in here
        assert "rank 1 came to " in there and "where rank 0 came to " in there
        if call not in (lists, splits):
            assert first in there and second.removesuffix(" in other sizes or dtypes") in there


@TWO.row
def uneven() -> list:
    """What PyTorch lets differ between ranks."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    shaped = torch.ones((2, 3) if rank else (3, 2), device=device)
    dist.all_reduce(shaped)  # as many elements
    parts = [torch.empty(2, device=device), torch.empty(3, device=device)]
    dist.all_gather(parts, torch.full((2 + rank,), float(rank), device=device))
    sizes = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    taken = torch.empty(sum(sizes[0]), device=device)
    dist.all_to_all_single(taken, torch.full((sum(sizes[1]),), float(rank), device=device), *sizes)
    mine = torch.empty(2 + rank, device=device)
    dist.reduce_scatter(mine, [torch.ones(2, device=device), torch.ones(3, device=device)])
    outputs = [torch.empty(size, device=device) for size in sizes[0]]
    dist.all_to_all(outputs, [torch.full((size,), float(rank), device=device) for size in sizes[1]])
    return [x.flatten().tolist() for x in (shaped, *parts, taken, mine, *outputs)]


def test_what_may_differ():
    zero, one = TWO[uneven]
    for found, taken, mine in ((zero, [0, 1, 1, 1], [2, 2]), (one, [0, 0, 1, 1], [2, 2, 2])):
        assert found[:3] == [[2] * 6, [0, 0], [1, 1, 1]]
        assert found[3] == found[5] + found[6] == taken and found[4] == mine


# -- messages


def expanded():
    """Four numbers that say to be 4000, as a mask that was broadcast."""
    device = torch.device("cuda", dist.get_rank())
    if dist.get_rank() == 0:
        dist.send(torch.arange(1.0, 5.0, device=device).unsqueeze(1).expand(4, 1000), 1)
        return None
    received = torch.empty_strided((4, 1000), (1, 0), device=device)
    beside = torch.full((4000,), 7.0, device=device)
    dist.recv(received, 0)
    return received[:, ::999].tolist(), beside.unique().tolist()


def to_itself():
    """As the last rank of a V-shaped pipeline does, which has two stages in a row."""
    group, device = dist.group.WORLD, torch.device("cuda", dist.get_rank())
    given, taken = torch.arange(3.0, device=device), torch.zeros(3, device=device)
    with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as both:
        group.recv([taken], dist.get_rank(), 0)
        group.send([given], dist.get_rank(), 0)
    both.wait()
    return taken.tolist()


def two_sizes():
    if dist.get_rank() == 0:
        return expanded(), to_itself(), dist.send(torch.ones(100_000, device="cuda:0"), 1)
    given = expanded(), to_itself()
    assert given == (([[n, n] for n in (1.0, 2.0, 3.0, 4.0)], [7.0]), [0.0, 1.0, 2.0])
    return dist.recv(torch.zeros(10, device="cuda:1"), 0)


def test_elements_that_share_memory_travel_once_and_two_sizes_are_an_error(on_gpus):
    with pytest.raises(WorkerError, match="rank 0 sends 400000 bytes where rank 1 receives 40: give both a tensor"):
        on_gpus(two_sizes)


class Ring:
    """This rank's messages to the next one and from the one before, in a group of its own."""

    def __init__(self, count: int, warm: bool):
        rank, size = dist.get_rank(), dist.get_world_size()
        self.following, self.before = (rank + 1) % size, (rank - 1) % size
        self.group = dist.new_group(backend="nccl", timeout=timedelta(seconds=20))
        self.mine, self.theirs = torch.full((count,), 1.0 + rank, device="cuda"), torch.zeros(count, device="cuda")
        for sender in range(size) if warm else ():  # NCCL connects both ends with the first message in each direction
            for other in {(sender + 1) % size, (sender - 1) % size}:
                if rank in (sender, other):
                    way = dist.send if rank == sender else dist.recv
                    way(self.theirs[:1], sender + other - rank, group=self.group)

    def isend(self):
        return dist.isend(self.mine, self.following, group=self.group)

    def irecv(self):
        return dist.irecv(self.theirs, self.before, group=self.group)

    def batch(self, *ways):
        peers = {dist.isend: (self.mine, self.following), dist.irecv: (self.theirs, self.before)}
        for work in dist.batch_isend_irecv([dist.P2POp(way, *peers[way], self.group) for way in ways]):
            work.wait()

    def send(self, times=1):
        for _ in range(times):
            self.isend().wait()

    def recv(self, times=1):
        for _ in range(times):
            self.irecv().wait()


def isend_first(ring):
    sending = ring.isend()
    ring.recv()
    sending.wait()


def irecv_first(ring):
    for work in (ring.irecv(), ring.isend()):
        work.wait()


def on_a_stream(ring):
    with torch.cuda.stream(torch.cuda.Stream()):
        ring.send()
    ring.recv()


def as_objects(ring):
    found = [None]
    dist.send_object_list([ring.mine[:1].tolist()], ring.following, ring.group)
    dist.recv_object_list(found, ring.before, ring.group)
    ring.theirs[0] = found[0][0]


WAYS = {
    "send first": lambda ring: (ring.send(), ring.recv()),
    "receive first": lambda ring: (ring.recv(), ring.send()),
    "isend first": isend_first,
    "irecv first": irecv_first,
    "on a stream": on_a_stream,
    "one batch": lambda ring: ring.batch(dist.isend, dist.irecv),
    "batches": lambda ring: (ring.batch(dist.isend), ring.batch(dist.irecv)),
    "as objects": as_objects,
    "eight": lambda ring: (ring.send(8), ring.recv(8)),
    "nine": lambda ring: (ring.send(9), ring.recv(8)),
}
SMALL, LARGE = 1_000, 1 << 20  # numbers of 4 bytes; the buffer between two T4 holds 1 MiB
SENDS = r"both ranks send first, and NCCL would hang: (rank \d sends {size} bytes to rank \d{on}[,;] ){{2}}"
TAKES = r"both ranks receive first, and NCCL would hang: (rank \d receives from rank \d[,.] ){{2}}Let one of them send first"
CONNECTS = SENDS + "the first message of a direction connects its sender with its receiver"
WAITS = SENDS + "a message of more than 1 MiB leaves its sender when the receiver has come to it. Use batch_isend_irecv"
FULL = SENDS + "NCCL's buffer has room for 8 small messages that nobody has received"
COLD = {"send first": CONNECTS, "isend first": CONNECTS, "receive first": TAKES, "irecv first": TAKES, "on a stream": CONNECTS,
        "one batch": "", "batches": CONNECTS, "as objects": CONNECTS}  # fmt: skip
WARM = {"send first": "", "isend first": "", "receive first": TAKES, "irecv first": TAKES, "on a stream": "", "one batch": "",
        "batches": "", "as objects": "", "eight": "", "nine": FULL}  # fmt: skip
BIG = {"send first": WAITS, "isend first": WAITS, "receive first": TAKES, "irecv first": TAKES, "on a stream": WAITS,
       "one batch": "", "batches": WAITS}  # fmt: skip


def around(ways: list[str], count: int, warm: bool) -> list[str]:
    """What each of these ways comes to."""
    found = []
    for way in ways:
        ring, begin = Ring(count, warm), time.monotonic()
        try:
            WAYS[way](ring)
            found.append(f"from {int(ring.theirs[0]) - 1}")
        except dist.DistBackendError as error:
            found.append(str(error))
        assert time.monotonic() - begin < 10, found[-1]
    dist.barrier()  # nobody leaves while another one still looks
    return found


@TWO.row
def rings():
    return [around(list(expected), count, warm) for expected, count, warm in RINGS]


RINGS = [(COLD, SMALL, False), (WARM, SMALL, True), (BIG, LARGE, True)]


@pytest.mark.parametrize("which", range(3))
def test_messages_that_wait_for_each_other_are_told_at_once(which):
    """And those that NCCL's buffer has room for go through."""
    expected, count, _ = RINGS[which]
    for rank, results in enumerate(TWO[rings]):
        for (way, message), found in zip(expected.items(), results[which], strict=True):
            on, size = (r" on stream \d+" if way == "on a stream" else ""), f"{4 * count:,}"
            message = message.format(size=size if way != "as objects" else 8, on=on) or f"^from {1 - rank}$"
            assert re.search(message, found), (way, found)


@THREE.row
def rings_of_three():
    return [around(["send first"], SMALL, warm)[0] for warm in (False, True)]


def test_a_ring_of_three_that_send_first():
    for cold, warm in THREE[rings_of_three]:
        assert "ranks 0, 1, 2 send first, and NCCL would hang" in cold and "from " in warm
