"""Ranks whose collectives differ: both are named, and no process ends by a signal. Nothing of NCCL compares them."""

import pytest
import torch

UNLIKE = {  # what ranks 0 and 1 call, and what is said of them
    "shapes": ("all_reduce of 4 float32 (sum)", "all_reduce of 6 float32 (sum)"),
    "dtypes": ("all_reduce of 4 float32 (sum)", "all_reduce of 4 int32 (sum)"),
    "operations": ("all_reduce of 4 float32 (sum)", "all_reduce of 4 float32 (max)"),
    "roots": ("broadcast of 4 float32 from rank 0", "broadcast of 4 float32 from rank 1"),
    "kinds": ("all_reduce of 4 float32 (sum)", "broadcast of 4 float32 from rank 0"),
    "barrier": ("barrier", "all_reduce of 4 float32 (sum)"),
    "gathered": ("all_gather of 4 float32", "all_gather of 6 float32"),
    "lists": ("all_gather and takes 4 float32 from rank 1", "all_gather and gives it 2"),
    "scattered": ("reduce_scatter of 4 float32 (sum)", "reduce_scatter of 6 float32 (sum)"),
    "gather": ("gather of 4 float32 to rank 0", "gather of 6 float32 to rank 0"),
    "scatter": ("scatter of 4 float32 from rank 0", "scatter of 6 float32 from rank 0"),
    "splits": ("all_to_all and gives rank 1 3 float32", "all_to_all and takes 2 from it"),
    "several": (
        "all_reduce of 2 tensors with 8 float32 (sum)",
        "all_reduce of 2 tensors with 8 float32 (sum) in other",
    ),
}


def calls(name: str, group, device):
    import torch.distributed as dist

    rank = dist.get_rank()
    x, n = torch.ones(4, device=device), (4, 6)[rank]
    y = torch.ones(n, device=device)
    if name == "shapes":
        dist.all_reduce(y, group=group)
    elif name == "dtypes":
        dist.all_reduce(x.int() if rank else x, group=group)
    elif name == "operations":
        dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group)
    elif name == "roots":
        dist.broadcast(x, rank, group=group)
    elif name == "kinds":
        dist.broadcast(x, 0, group=group) if rank else dist.all_reduce(x, group=group)
    elif name == "barrier":
        dist.all_reduce(x, group=group) if rank else dist.barrier(group=group, device_ids=[0])
    elif name == "gathered":
        dist.all_gather_into_tensor(y.repeat(2), y, group=group)
    elif name == "lists":
        dist.all_gather([x.clone(), x.clone()], x[:2].clone() if rank else x, group=group)
    elif name == "scattered":
        dist.reduce_scatter_tensor(y, y.repeat(2), group=group)
    elif name == "gather":
        dist.gather(y, None if rank else [y.clone(), y.clone()], 0, group=group)
    elif name == "scatter":
        dist.scatter(y, None if rank else [y.clone(), y.clone()], 0, group=group)
    elif name == "splits":
        sizes = ([1, 3], [1, 3]) if rank == 0 else ([2, 2], [3, 2])
        given = torch.ones(sum(sizes[1]), device=device)
        dist.all_to_all_single(torch.empty(sum(sizes[0]), device=device), given, *sizes, group=group)
    elif name == "several":
        sizes = (2, 6) if rank else (4, 4)
        with dist._coalescing_manager(group=group, device=device):
            for size in sizes:
                dist.all_reduce(torch.ones(size, device=device), group=group)


def all_of_them(names) -> dict[str, str]:
    import torch.distributed as dist

    device, said = torch.device("cuda", dist.get_rank()), {}
    for name in names:
        group = dist.new_group(backend="nccl")
        for _ in range(2):  # the second time nothing begins
            try:
                calls(name, group, device)
                torch.cuda.synchronize()
                said[name] = "nothing"
            except dist.DistBackendError as error:
                said.setdefault(name, str(error))
    return said


@pytest.mark.parametrize("dry", [False, True])
def test_both_are_named(on_gpus, dry):
    zero, one = on_gpus(all_of_them, list(UNLIKE), dry=dry)
    for name, (first, second) in UNLIKE.items():
        second = second.removesuffix(" in other")
        for said, (mine, theirs) in ((zero[name], (0, 1)), (one[name], (1, 0))):
            assert f"rank {mine} came to" in said and f"where rank {theirs} came to" in said, (name, said)
            if name not in ("lists", "splits"):
                assert first in said and second in said, (name, said)
    for name in ("lists", "splits"):
        assert f"rank 0 came to {UNLIKE[name][0]} where rank 1 came to {UNLIKE[name][1]}" in zero[name], zero[name]
    assert "in other sizes or dtypes" in zero["several"]


def uneven() -> list:
    """What PyTorch lets differ between ranks."""
    import torch.distributed as dist

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
    lists = [torch.empty(size, device=device) for size in sizes[0]]
    dist.all_to_all(lists, [torch.full((size,), float(rank), device=device) for size in sizes[1]])
    return [x.flatten().tolist() for x in (shaped, *parts, taken, mine, *lists)]


def test_what_may_differ(on_gpus):
    zero, one = on_gpus(uneven)
    for said, taken, mine in ((zero, [0, 1, 1, 1], [2, 2]), (one, [0, 0, 1, 1], [2, 2, 2])):
        assert said[:3] == [[2] * 6, [0, 0], [1, 1, 1]]
        assert said[3] == said[5] + said[6] == taken and said[4] == mine


def returns_before_the_first():
    import torch.distributed as dist

    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1 will not come to it: it has returned"):
            dist.all_reduce(torch.ones(1, device="cuda:0"))
        return "named"
    return None


def test_a_rank_that_has_returned_before_the_first(on_gpus):
    assert on_gpus(returns_before_the_first, timeout=30) == ["named", None]


def late_for_the_first() -> list[str]:
    from datetime import timedelta

    import torch.distributed as dist

    groups = [dist.new_group(backend="nccl", timeout=timedelta(seconds=1)) for _ in range(2)]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["both have ended"])
        return []
    said = []
    calls = dist.all_reduce, lambda x, group: dist.recv(x, 1, group=group)
    for begin, group in zip(calls, groups, strict=True):
        try:
            begin(torch.ones(1, device="cuda:0"), group=group)
        except dist.DistBackendError as error:
            said.append(str(error))
    store.set("both have ended", "")
    return said


def test_the_first_has_the_limit_of_its_group(on_gpus):
    collective, message = on_gpus(late_for_the_first, timeout=30)[0]
    assert collective.startswith("all_reduce of rank 0 in group")
    assert message.startswith("recv from rank 1 of rank 0 in group")
    for said in (collective, message):
        assert "timed out after 1 s: rank 1 had not come to it" in said
