"""Numbers and places of every collective, on three ranks of virtual GPUs started once a test."""

import pytest
import torch

import virtualgpu


def collectives():
    """Each collective's result as this rank has it."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    mine = torch.arange(3.0, device=device) + 10 * rank
    said = {}

    def note(name, *tensors):
        assert all(tensor.device == device for tensor in tensors)
        said[name] = [tensor.tolist() for tensor in tensors]

    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        total = mine.clone()
        dist.all_reduce(total, getattr(dist.ReduceOp, op))
        note(f"all_reduce {op}", total)
    half = mine.clone()
    dist.all_reduce(half, dist._make_nccl_premul_sum(0.5))
    note("all_reduce of halves", half)
    true = torch.tensor([rank == 1, False], device=device)
    dist.all_reduce(true)
    note("all_reduce of bool", true)
    whole = torch.tensor([1 + rank, -4 * rank], device=device)
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    note("average of whole numbers", whole)
    turned = (torch.ones(2, device=device) * (1 + 1j * rank)).to(torch.complex64)
    dist.all_reduce(turned)
    note("all_reduce of complex", torch.view_as_real(turned))
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        narrow = torch.full((2,), 1 + rank, dtype=dtype, device=device)
        dist.all_reduce(narrow)
        assert narrow.tolist() == [6, 6] and narrow.dtype is dtype
    last = torch.ones(2, 2, 2, 2, device=device).to(memory_format=torch.channels_last) * rank
    dist.all_reduce(last)
    assert last.is_contiguous(memory_format=torch.channels_last) and last.unique().tolist() == [3]

    parts = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(parts, mine)
    note("all_gather", *parts)
    uneven = [torch.empty(1 + other, device=device) for other in range(size)]
    dist.all_gather(uneven, torch.full((1 + rank,), float(rank), device=device))
    note("all_gather of uneven parts", *uneven)
    out = torch.empty(size, 3, device=device)
    dist.all_gather_into_tensor(out, mine)
    note("all_gather_into_tensor", out)
    out[rank] += 1
    dist.all_gather_into_tensor(out, out[rank])
    note("all_gather of a part of the result", out)
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device=device), op=dist.ReduceOp.AVG)
    note("reduce_scatter_tensor", part)
    pieces = [torch.full((2,), float(other), device=device) for other in range(size)]
    dist.reduce_scatter(part, pieces)
    note("reduce_scatter", part)

    for root in range(size):
        copy = mine.clone()
        dist.broadcast(copy, root)
        note(f"broadcast from {root}", copy)
    copy = mine.clone()
    dist.reduce(copy, 1)
    note("reduce to 1", copy)
    parts = [torch.empty(3, device=device) for _ in range(size)] if rank == 2 else None
    dist.gather(mine, parts, 2)
    note("gather to 2", *parts or [])
    pieces = [torch.full((2,), 7.0 + other, device=device) for other in range(size)] if rank == 0 else None
    dist.scatter(part, pieces, 0)
    note("scatter from 0", part)

    out = torch.empty(size, device=device)
    dist.all_to_all_single(out, torch.arange(float(size), device=device) + 10 * rank)
    note("all_to_all_single", out)
    sizes = [1, 2, 0]  # rank r sends sizes[(r + other) % 3] to the others
    sends = [sizes[(rank + other) % 3] for other in range(size)]
    out = torch.empty(sum(sends), 2, device=device)
    dist.all_to_all_single(out, torch.full((sum(sends), 2), float(rank), device=device), sends, sends)
    note("all_to_all_single of uneven parts", out)
    outs = [torch.empty(1, device=device) for _ in range(size)]
    dist.all_to_all(outs, [torch.full((1,), 10.0 * rank + other, device=device) for other in range(size)])
    note("all_to_all", *outs)
    dist.barrier()

    things = [None] * size
    dist.all_gather_object(things, {"rank": rank})
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, 2)
    received = [None]
    dist.scatter_object_list(received, ["a", "b", "c"] if rank == 0 else None, 0)
    said["objects"] = [things, box, received]
    return said


def test_collectives(on_gpus):
    zero, one, two = on_gpus(collectives, n=3)
    for name, value in {
        "all_reduce SUM": [[30, 33, 36]],
        "all_reduce AVG": [[10, 11, 12]],
        "all_reduce MAX": [[20, 21, 22]],
        "all_reduce MIN": [[0, 1, 2]],
        "all_reduce PRODUCT": [[0, 231, 528]],
        "all_reduce of halves": [[15, 16.5, 18]],
        "all_reduce of bool": [[True, False]],
        "average of whole numbers": [[2, -4]],
        "all_reduce of complex": [[[3, 3], [3, 3]]],
        "all_gather": [[0, 1, 2], [10, 11, 12], [20, 21, 22]],
        "all_gather of uneven parts": [[0], [1, 1], [2, 2, 2]],
        "all_gather_into_tensor": [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]],
        "all_gather of a part of the result": [[[1, 2, 3], [11, 12, 13], [21, 22, 23]]],
        "broadcast from 1": [[10, 11, 12]],
        "broadcast from 2": [[20, 21, 22]],
        "objects": [[{"rank": 0}, {"rank": 1}, {"rank": 2}], ["from 2"]],
    }.items():
        for said in (zero, one, two):
            assert said[name][: len(value)] == value, name
    assert [said["reduce_scatter_tensor"][0] for said in (zero, one, two)] == [[0, 1], [2, 3], [4, 5]]
    assert [said["reduce_scatter"][0] for said in (zero, one, two)] == [[0, 0], [3, 3], [6, 6]]
    assert [said["reduce to 1"][0] for said in (zero, one, two)] == [[0, 1, 2], [30, 33, 36], [20, 21, 22]]
    assert zero["gather to 2"] == [] and two["gather to 2"] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert [said["scatter from 0"][0] for said in (zero, one, two)] == [[7, 7], [8, 8], [9, 9]]
    assert [said["all_to_all_single"][0] for said in (zero, one, two)] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert zero["all_to_all_single of uneven parts"] == [[[0, 0], [1, 1], [1, 1]]]
    assert two["all_to_all"] == [[2], [12], [22]]
    assert [said["objects"][2] for said in (zero, one, two)] == [["a"], ["b"], ["c"]]


def functional():
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as collectives

    rank = dist.get_rank()
    device, world = torch.device("cuda", rank), dist.group.WORLD
    mine = torch.arange(4.0, device=device) + rank
    results = [
        collectives.all_reduce(mine, "avg", world),
        collectives.all_gather_tensor(mine, 0, world),
        collectives.all_gather_tensor(mine.view(2, 2), 1, world),
        collectives.reduce_scatter_tensor(mine, "sum", 0, world),
        collectives.all_to_all_single(mine, [2, 2], [2, 2], world),
        collectives.broadcast(mine, 1, world),
        *collectives.all_reduce_coalesced([mine, mine * 2], "sum", world),
        *collectives.all_gather_into_tensor_coalesced([mine[:1], mine[:2]], world),
        *collectives.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world),
    ]
    assert all(result.device == device for result in results)
    given = mine.clone().requires_grad_()
    collectives.all_gather_tensor_autograd(given, 0, world).sum().backward()
    held = torch.cuda.memory_allocated()
    return [(result + 0).tolist() for result in results], given.grad.tolist(), held


def test_functional_collectives(on_gpus):
    (zero, gradient, held), (one, _, _) = on_gpus(functional)
    assert zero[0] == one[0] == [0.5, 1.5, 2.5, 3.5]
    assert zero[1] == one[1] == [0, 1, 2, 3, 1, 2, 3, 4]
    assert zero[2] == [[0, 1, 1, 2], [2, 3, 3, 4]]
    assert (zero[3], one[3]) == ([1, 3], [5, 7])
    assert (zero[4], one[4]) == ([0, 1, 1, 2], [2, 3, 3, 4])
    assert zero[5] == one[5] == [1, 2, 3, 4]
    assert zero[6:8] == [[1, 3, 5, 7], [2, 6, 10, 14]]
    assert zero[8:10] == [[0, 1], [0, 1, 1, 2]]
    assert zero[10:] == [[1, 3], [1, 3]]
    assert gradient == [2, 2, 2, 2]
    assert held % 512 == 0 and held >= 12 * 512  # results lie on the GPU


def groups():
    import torch.distributed as dist

    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    said = []
    pair = dist.new_group([0, 2], backend="nccl")
    if rank != 1:
        both = torch.full((1,), float(rank), device=device)
        dist.all_reduce(both, group=pair)
        said.append((both.item(), dist.get_backend(pair), dist.get_process_group_ranks(pair)))
        dist.destroy_process_group(pair)
    nccl = dist.new_group(backend="nccl")
    assert dist.get_backend(nccl) == "nccl" and isinstance(nccl._get_backend(device), dist.ProcessGroupNCCL)
    split = dist.split_group(nccl, [[0, 1], [2]])
    total = torch.full((1,), 1.0 + rank, device=device)
    dist.all_reduce(total, group=split)
    said.append((total.item(), dist.get_process_group_ranks(split)))
    mesh = dist.init_device_mesh("cuda", (3, 1), mesh_dim_names=("rows", "columns"))
    dist.all_reduce(total, group=mesh["rows"].get_group())
    said.append((total.item(), mesh.device_type, mesh.get_local_rank("rows")))

    with dist._coalescing_manager(nccl, device, async_ops=True) as manager:
        lots = [torch.full((2,), float(rank), device=device) for _ in range(3)]
        for tensor in lots:
            dist.all_reduce(tensor, group=nccl)
    manager.wait()
    said.append([tensor.tolist() for tensor in lots])

    work = dist.all_reduce(total, group=nccl, async_op=True)
    before = work.is_completed()
    work.wait()
    torch.cuda.synchronize()
    said.append((before, work.is_completed(), work.get_future().value()[0].item()))

    errors = []
    for wrong in (
        lambda: dist.all_reduce(torch.ones(1), group=nccl),
        lambda: dist.all_reduce(torch.ones(4, device=device)[::2], group=nccl),
        lambda: dist.all_reduce(torch.ones(1, device=device, dtype=torch.int32), dist.ReduceOp.BXOR, nccl),
        lambda: dist.all_reduce(torch.ones(1, device=device, dtype=torch.bool), dist.ReduceOp.AVG, nccl),
        lambda: dist.monitored_barrier(nccl),
        lambda: dist.recv(torch.ones(1, device=device), group=nccl),
    ):
        try:
            wrong()
        except (RuntimeError, ValueError, TypeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return said, errors


def test_groups_works_and_errors(on_gpus):
    results = on_gpus(groups, n=3)
    (zero, errors), (one, _), (two, _) = results
    assert zero[0] == two[0] == (2.0, "nccl", [0, 2])
    assert [said[-4][0] for said in (zero, one, two)] == [3.0, 3.0, 3.0]
    assert [said[-4][1] for said in (zero, one, two)] == [[0, 1], [0, 1], [2]]
    assert [said[-3] for said in (zero, one, two)] == [(9.0, "cuda", 0), (9.0, "cuda", 1), (9.0, "cuda", 2)]
    assert zero[-2] == [[3, 3]] * 3
    assert zero[-1] == (False, True, 27.0)
    words = (
        "RuntimeError: No backend type associated with device type cpu",
        "ValueError: Tensors must be contiguous",
        "ValueError: Cannot use ReduceOp.BXOR with NCCL",
        "TypeError: Cannot use ReduceOp.AVG with boolean inputs",
        "ValueError: monitored_barrier",
        "RuntimeError: recv from any source is not there with NCCL",
    )
    assert len(errors) == len(words)
    for error, expected in zip(errors, words, strict=True):
        assert error.startswith(expected)


def test_one_rank_alone():
    import torch.distributed as dist

    virtualgpu.gpus(1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        x = torch.arange(3.0, device="cuda")
        dist.all_reduce(x)
        out = torch.empty(3, device="cuda")
        dist.all_gather_into_tensor(out, x)
        assert dist.get_backend() == "nccl" and out.tolist() == [0, 1, 2]
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(RuntimeError, match="Unsupported Float8 type for NCCL reduction"):
            dist.all_reduce(x.to(torch.float8_e5m2fnuz))
    finally:
        dist.destroy_process_group()


def sums_of_fp8():
    from torch import distributed as dist

    rank, sums = dist.get_rank(), []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.tensor([1.0 + rank, 2.0], device="cuda").to(dtype)
        part = torch.empty(1, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(part, numbers, dist.ReduceOp.AVG)
        dist.all_reduce(numbers)
        sums.append((numbers.dtype is dtype, numbers.tolist(), part.item()))
    return sums


def test_sums_of_fp8(on_gpus):
    zero, one = on_gpus(sums_of_fp8, like="H100")
    assert zero == [(True, [3, 4], 1.5)] * 2 and one == [(True, [3, 4], 2)] * 2


def test_fp8_is_added_up_from_hopper_on_and_copied_everywhere():
    import torch.distributed as dist

    virtualgpu.gpus(1, like="A100")
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        x, out = (torch.full((3,), value, device="cuda").to(torch.float8_e4m3fn) for value in (1.5, 0.0))
        dist.all_gather_into_tensor(out, x)
        assert out.tolist() == [1.5, 1.5, 1.5]
        with pytest.raises(dist.DistBackendError, match="FP8 reduction support begins with sm90"):
            dist.all_reduce(x)
    finally:
        dist.destroy_process_group()


def test_more_works_than_are_remembered():
    """Nobody waits for them: the oldest are finished by themselves."""
    import torch.distributed as dist

    from virtualgpu.distributed.communicator import KEPT

    virtualgpu.gpus(1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        x = torch.ones(1, device="cuda")
        for _ in range(KEPT + 10):
            dist.all_reduce(x, async_op=True)
        torch.cuda.synchronize()
        assert x.item() == 1
    finally:
        dist.destroy_process_group()
