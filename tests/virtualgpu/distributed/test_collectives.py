"""Numbers and places of every collective, on three ranks of virtual GPUs started once; groups; and numbers that nobody has waited for."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import virtualgpu
from tests.virtualgpu.distributed.conftest import Rows
from virtualgpu.distributed.communicator import KEPT

N = 3  # ranks
THREE, TWO = Rows(N), Rows(like="H100")  # which adds up FP8


def reduced(x, op=None):
    dist.all_reduce(x, dist.ReduceOp.SUM if op is None else getattr(dist.ReduceOp, op))
    return x


def rows(call, out, *args):
    """What a collective that writes to `out` writes."""
    call(out, *args)
    return out


def empties(like, count=N):
    return [torch.empty_like(like) for _ in range(count)]


def premultiplied(r, x):
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    return x


def gathered_unevenly(r, x):
    outputs = [x.new_empty(1 + other) for other in range(N)]
    return rows(dist.all_gather, outputs, x.new_full((1 + r,), float(r)))


def gathered_in_place(r, x):
    """From a part of the result."""
    out = x.new_zeros(N, 3)
    out[r] = x + 1
    return rows(dist.all_gather_into_tensor, out, out[r])


def gathered_by(root):
    def gather(r, x):
        outputs = empties(x) if r == root else None
        dist.gather(x, outputs, root)
        return outputs or []

    return gather


def exchanged_unevenly(r, x):
    sizes = [1, 2, 0]  # rank r sends sizes[(r + other) % 3] to the others
    sends = [sizes[(r + other) % N] for other in range(N)]
    return rows(dist.all_to_all_single, x.new_empty(sum(sends), 2), x.new_full((sum(sends), 2), float(r)), sends, sends)


def channels_last(r, x):
    last = x.new_full((2, 2, 2, 2), float(r)).to(memory_format=torch.channels_last)
    assert reduced(last).is_contiguous(memory_format=torch.channels_last)
    return last.unique()


def narrow(r, x):
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8)
    return [reduced(x.new_full((1,), 1 + r, dtype=dtype)).to(torch.float32) for dtype in kinds]


def objects(r, x):
    things, box, received = [None] * N, [f"from {r}"], [None]
    dist.all_gather_object(things, {"rank": r})
    dist.broadcast_object_list(box, 2)
    dist.scatter_object_list(received, ["a", "b", "c"] if r == 0 else None, 0)
    return things + box + received


THINGS = [{"rank": 0}, {"rank": 1}, {"rank": 2}, "from 2"]
ALL = [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
COLLECTIVES = {  # of rank r with x = [10 r, 10 r + 1, 10 r + 2]: what comes out on all ranks, or (on rank 0, 1, 2)
    "all_reduce, sum": (lambda r, x: reduced(x), [30, 33, 36]),
    "all_reduce, average": (lambda r, x: reduced(x, "AVG"), [10, 11, 12]),
    "all_reduce, largest": (lambda r, x: reduced(x, "MAX"), [20, 21, 22]),
    "all_reduce, least": (lambda r, x: reduced(x, "MIN"), [0, 1, 2]),
    "all_reduce, product": (lambda r, x: reduced(x, "PRODUCT"), [0, 231, 528]),
    "all_reduce of halves": (premultiplied, [15, 16.5, 18]),
    "all_reduce of bool": (lambda r, x: reduced(torch.tensor([r == 1, False], device=x.device)), [True, False]),
    "average of whole numbers": (lambda r, x: reduced(torch.tensor([1 + r, -4 * r], device=x.device), "AVG"), [2, -4]),
    "all_reduce of complex": (lambda r, x: torch.view_as_real(reduced(torch.complex(x[:1] * 0 + 1, x[:1]))), [[3, 30]]),
    "all_reduce of other types": (narrow, [[6]] * 5),
    "all_reduce, channels last": (channels_last, [3]),
    "all_gather": (lambda r, x: rows(dist.all_gather, empties(x), x), ALL),
    "all_gather, uneven": (gathered_unevenly, [[0], [1, 1], [2, 2, 2]]),
    "all_gather_into_tensor": (lambda r, x: rows(dist.all_gather_into_tensor, x.new_empty(N, 3), x), ALL),
    "all_gather in place": (gathered_in_place, [[1, 2, 3], [11, 12, 13], [21, 22, 23]]),
    "reduce_scatter_tensor": (
        lambda r, x: rows(dist.reduce_scatter_tensor, x.new_empty(2), torch.arange(6.0, device=x.device), dist.ReduceOp.AVG),
        ([0, 1], [2, 3], [4, 5]),
    ),
    "reduce_scatter": (
        lambda r, x: rows(dist.reduce_scatter, x.new_empty(2), [x.new_full((2,), float(other)) for other in range(N)]),
        ([0, 0], [3, 3], [6, 6]),
    ),
    "broadcast from 0": (lambda r, x: rows(dist.broadcast, x, 0), [0, 1, 2]),
    "broadcast from 2": (lambda r, x: rows(dist.broadcast, x, 2), [20, 21, 22]),
    "reduce": (lambda r, x: rows(dist.reduce, x, 1), ([0, 1, 2], [30, 33, 36], [20, 21, 22])),
    "gather": (gathered_by(2), ([], [], ALL)),
    "scatter": (
        lambda r, x: rows(dist.scatter, x.new_empty(2), [x.new_full((2,), 7.0 + o) for o in range(N)] if r == 0 else None),
        ([7, 7], [8, 8], [9, 9]),
    ),
    "all_to_all_single": (
        lambda r, x: rows(dist.all_to_all_single, torch.empty_like(x), x),
        ([0, 10, 20], [1, 11, 21], [2, 12, 22]),
    ),
    "all_to_all_single, uneven": (
        exchanged_unevenly,
        ([[0, 0], [1, 1], [1, 1]], [[0, 0], [0, 0], [2, 2]], [[1, 1], [2, 2], [2, 2]]),
    ),
    "all_to_all": (
        lambda r, x: rows(dist.all_to_all, empties(x[:1]), list(x.split(1))),
        ([[0], [10], [20]], [[1], [11], [21]], [[2], [12], [22]]),
    ),
    "objects": (objects, tuple([*THINGS, received] for received in "abc")),
}  # fmt: skip


@THREE.row
def every_collective() -> list:
    rank, found = dist.get_rank(), []
    device = torch.device("cuda", rank)
    for call, _ in COLLECTIVES.values():
        out = call(rank, torch.arange(3.0, device=device) + 10 * rank)
        assert all(tensor.device == device for tensor in out if isinstance(tensor, torch.Tensor))
        lists = (
            [t.tolist() if isinstance(t, torch.Tensor) else t for t in out] if isinstance(out, list) else out.tolist()
        )
        found.append(lists)
    dist.barrier()
    return found


def test_collectives():
    ranks = THREE[every_collective]
    for name, (_, expected), *found in zip(COLLECTIVES, COLLECTIVES.values(), *ranks, strict=True):
        assert found == list(expected if isinstance(expected, tuple) else [expected] * N), name


@TWO.row
def functional_ones():
    rank = dist.get_rank()
    device, world = torch.device("cuda", rank), dist.group.WORLD
    mine = torch.arange(4.0, device=device) + rank
    results = [
        functional.all_reduce(mine, "avg", world),
        functional.all_gather_tensor(mine, 0, world),
        functional.all_gather_tensor(mine.view(2, 2), 1, world),
        functional.reduce_scatter_tensor(mine, "sum", 0, world),
        functional.all_to_all_single(mine, [2, 2], [2, 2], world),
        functional.broadcast(mine, 1, world),
        *functional.all_reduce_coalesced([mine, mine * 2], "sum", world),
        *functional.all_gather_into_tensor_coalesced([mine[:1], mine[:2]], world),
        *functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world),
    ]
    assert all(result.device == device for result in results)
    given = mine.clone().requires_grad_()
    functional.all_gather_tensor_autograd(given, 0, world).sum().backward()
    held = torch.cuda.memory_allocated()
    return [(result + 0).tolist() for result in results], given.grad.tolist(), held


def test_functional_collectives():
    for rank, (found, gradient, held) in enumerate(TWO[functional_ones]):
        assert found == [
            [0.5, 1.5, 2.5, 3.5],
            [0, 1, 2, 3, 1, 2, 3, 4],
            [[0, 1, 1, 2], [2, 3, 3, 4]],
            [[1, 3], [5, 7]][rank],
            [[0, 1, 1, 2], [2, 3, 3, 4]][rank],
            [1, 2, 3, 4],
            *([1, 3, 5, 7], [2, 6, 10, 14]),
            *([0, 1], [0, 1, 1, 2]),
            *([[1, 3]] * 2 if rank == 0 else [[5, 7]] * 2),
        ]
        assert gradient == [2, 2, 2, 2]
        assert held % 512 == 0 and held >= 12 * 512  # results lie on the GPU


@THREE.gives(
    *[((3.0, its), (9.0, "cuda", r), [[3, 3]] * 3, (False, True, 27.0)) for r, its in enumerate([[0, 1], [0, 1], [2]])]
)
def groups_and_works():
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    pair = dist.new_group([0, 2], backend="nccl")
    if rank != 1:
        both = reduced_in(pair, torch.full((1,), float(rank), device=device))
        assert (both.item(), dist.get_backend(pair), dist.get_process_group_ranks(pair)) == (2.0, "nccl", [0, 2])
        dist.destroy_process_group(pair)
    nccl = dist.new_group(backend="nccl")
    assert dist.get_backend(nccl) == "nccl" and isinstance(nccl._get_backend(device), dist.ProcessGroupNCCL)
    split = dist.split_group(nccl, [[0, 1], [2]])
    total = reduced_in(split, torch.full((1,), 1.0 + rank, device=device))
    of_split = total.item(), dist.get_process_group_ranks(split)
    mesh = dist.init_device_mesh("cuda", (3, 1), mesh_dim_names=("rows", "columns"))
    reduced_in(mesh["rows"].get_group(), total)
    of_mesh = total.item(), mesh.device_type, mesh.get_local_rank("rows")
    with dist._coalescing_manager(nccl, device, async_ops=True) as manager:
        lots = [torch.full((2,), float(rank), device=device) for _ in range(3)]
        for tensor in lots:
            dist.all_reduce(tensor, group=nccl)
    manager.wait()
    coalesced = [tensor.tolist() for tensor in lots]
    work = dist.all_reduce(total, group=nccl, async_op=True)
    before = work.is_completed()
    work.wait()
    torch.cuda.synchronize()
    return of_split, of_mesh, coalesced, (before, work.is_completed(), work.get_future().value()[0].item())


def reduced_in(group, x):
    dist.all_reduce(x, group=group)
    return x


@TWO.gives(*[([[1, 1]] * 4, 6 - rank, [0, 1]) for rank in range(2)])
def a_communicator_for_each_gpu_of_a_rank() -> tuple:
    """Collectives go by the GPUs that the tensors are on, as NCCL does: nobody has to call torch.cuda.set_device."""
    rank, sums = dist.get_rank(), []
    shared = torch.full((2,), float(rank), device="cuda:0")  # ranks of gloo may share a GPU
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(shared, group=gloo)
    dist.barrier(gloo)
    sums.append(shared.tolist())
    for gpu in (rank, 1 - rank, rank):
        x = torch.full((2,), float(gpu), device=f"cuda:{gpu}")
        dist.all_reduce(x)
        sums.append(x.tolist())
    received = torch.zeros(1, device=f"cuda:{rank}")
    sent = torch.full((1,), 5.0 + rank, device=f"cuda:{rank}")
    torch.cuda.set_device(0)  # a batch is of its tensors' GPU, too
    both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    known = virtualgpu.machine().communicators.known
    return sums, received.item(), sorted(index for name, index in known if name == dist.group.WORLD.group_name)


@TWO.gives([(True, [3, 4], 1.5)] * 2, [(True, [3, 4], 2)] * 2)
def sums_of_fp8():
    """From Hopper on; copied they are everywhere."""
    rank, sums = dist.get_rank(), []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.tensor([1.0 + rank, 2.0], device="cuda").to(dtype)
        part = torch.empty(1, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(part, numbers, dist.ReduceOp.AVG)
        dist.all_reduce(numbers)
        sums.append((numbers.dtype is dtype, numbers.tolist(), part.item()))
    return sums


def test_one_rank_alone(alone):
    x = torch.full((3,), 1.5, device="cuda").to(torch.float8_e4m3fn)
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x)
    assert dist.get_backend() == "nccl" and out.tolist() == [1.5] * 3
    x = torch.ones(1, device="cuda")
    for _ in range(KEPT + 10):  # more works than are remembered: the oldest are finished by themselves
        dist.all_reduce(x, async_op=True)
    torch.cuda.synchronize()
    assert x.item() == 1


# -- collectives whose tensors are used before anybody waits: by the next collective, which NCCL's stream runs after them, or by a kernel


SIZE = 1 << 19  # so many that gloo is still busy when the next one comes


@TWO.gives(([[6.0], [3.0], [4.0], [1.5], [2.0, 4.0], [3.0]], [1.0, 2.0]))
def collectives_of_one_tensor():
    """What two in a row make of rank + 1, and whether the second read what the first made: gloo ran both at once, on the same memory."""
    rank, found = dist.get_rank(), []

    def full(n=SIZE):
        return torch.full((n,), rank + 1.0, device="cuda")

    def twice(x, first, second):
        for work in [first(x), second(x)]:
            if work is not None:
                work.wait()
        found.append(sorted(set(x.tolist())))

    def summed(x, op=dist.ReduceOp.SUM):
        return dist.all_reduce(x, op, async_op=True)

    received = full()
    twice(full(), summed, summed)
    twice(full(), summed, lambda x: dist.broadcast(x, 0))
    twice(full(), lambda x: dist.broadcast(x, 1, async_op=True), summed)
    twice(full(), lambda x: summed(x, dist.ReduceOp.AVG), lambda x: summed(x, dist.ReduceOp.MAX))
    twice(full(2 * SIZE), lambda x: dist.all_gather_into_tensor(x, x[rank * SIZE :][:SIZE], async_op=True), summed)
    twice(full(), lambda x: dist.all_to_all_single(received, x, async_op=True), summed)
    return found, received[:: SIZE // 2].tolist()


@TWO.gives(({3.0, 4.0}, True, [2.0], True))
def kernels_read_what_a_collective_brings_even_if_nobody_waits():
    """A race, which gave one or the other number, and an average that was still a sum."""
    begin = torch.cuda.memory_allocated()
    x, y, z = (torch.full((SIZE,), dist.get_rank() + 1.0, device="cuda") for _ in range(3))
    works = [dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)]
    doubled = x * 2
    works.append(dist.all_reduce(y, async_op=True))
    y.add_(1)
    works.append(dist.all_reduce(z, async_op=True))
    found = set(z.tolist()) | set(y.tolist()) | set(doubled.tolist())
    for work in works:
        work.wait()
    held = torch.cuda.memory_allocated() - begin == sum(held.nbytes for held in (x, y, z, doubled))
    q, s = torch.zeros(1, 4, 1024, 64, device="cuda"), torch.ones(2, 4, 1024, 64, device="cuda")
    works = [dist.reduce_scatter_tensor(q.view(-1), s.view(-1), async_op=True)]
    attended = nn.functional.scaled_dot_product_attention(q, q, q).unique().tolist()
    cell, x = nn.LSTMCell(64, 4, device="cuda"), torch.zeros(SIZE // 64, 64, device="cuda")
    works.append(dist.all_reduce(x.fill_(1), async_op=True))
    before = cell(x)[0]
    for work in works:
        work.wait()
    return found, held, attended, torch.equal(before, cell(x)[0])


test_three_ranks, test_two_ranks = THREE.test(), TWO.test()
