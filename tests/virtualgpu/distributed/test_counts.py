"""What ranks tell each other in a dry run: small tensors arrive as they would."""

import os

import pytest
import torch

import virtualgpu


def told() -> list:
    """How many, which, and how much: as libraries ask."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    length = torch.tensor(5 if rank == 0 else -1, device=where)
    dist.broadcast(length, src=0)
    sizes = [torch.empty(2, dtype=torch.int64, device=where) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([rank + 1, 10 * rank], device=where))
    together = torch.zeros(2 * size, dtype=torch.int64, device=where)
    dist.all_gather_into_tensor(together, torch.tensor([rank, rank], device=where))
    found = [length.item(), [each.tolist() for each in sizes], together.tolist(), together.view(size, 2)[-1].tolist()]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        count = torch.tensor([2 + rank], dtype=torch.int32, device=where)
        dist.all_reduce(count, op=op, async_op=True).wait()
        found.append(count.item())
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        unfinished = torch.tensor(0.0 if rank == 0 else 1.0, device=where)  # of transformers' generate, under FSDP
        dist.all_reduce(unfinished, op=op)
        found.append(unfinished.item())
    ready = torch.tensor([rank == 0], device=where)
    dist.all_reduce(ready, op=dist.ReduceOp.MIN)
    return [*found, bool(ready)]


def timed() -> list:
    """What ranks have measured, in single and half precision: the longest time, sums and means, everybody's, one rank's."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    where, found = torch.device("cuda", int(os.environ["LOCAL_RANK"])), []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            elapsed = torch.tensor([0.5 + rank, 2.0], device=where, dtype=dtype)
            dist.all_reduce(elapsed, op=op)
            found.append(elapsed.tolist())
    own = torch.tensor([rank + 0.25, 4.0], device=where)
    every, together = [torch.empty_like(own) for _ in range(size)], torch.empty(2 * size, device=where)
    dist.all_gather(every, own)
    dist.all_gather_into_tensor(together, own)
    part, one = torch.empty(1, device=where), own.clone()
    dist.reduce_scatter_tensor(part, torch.arange(1.0, size + 1, device=where) * (rank + 1))
    dist.broadcast(one, src=0)
    gathered = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
    dist.gather(own, gathered, dst=0)
    reduced, scattered = own.clone(), torch.empty(2, device=where)
    dist.reduce(reduced, dst=0)
    dist.scatter(scattered, [own * 2, own * 3] if rank == 0 else None, src=0)
    found += [[tensor.tolist() for tensor in every], together.view(size, 2).sum(0).tolist(), part.item(), one.tolist()]
    return [
        *found,
        [tensor.tolist() for tensor in gathered or ()],
        reduced.tolist() if rank == 0 else None,
        scattered.tolist(),
    ]


def sent() -> list:
    """How a pipeline's stages tell each other the shape of what comes: one by one, and both at a time."""
    import torch.distributed as dist

    rank = dist.get_rank()
    where = torch.device("cuda", rank)
    shape, other, found = torch.tensor([4, 8 + rank], device=where), torch.empty(2, dtype=torch.int64, device=where), []
    for sender in (0, 1):
        if rank == sender:
            dist.send(shape, 1 - rank)
        else:
            dist.recv(other, sender)
            found.append(other.tolist())
    both = [dist.P2POp(dist.isend, shape, 1 - rank), dist.P2POp(dist.irecv, other.zero_(), 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    activation, doubles = torch.ones(4, 8, device=where), torch.zeros(2, dtype=torch.float64, device=where)
    if rank == 0:
        dist.send(activation, 1)
        dist.send(shape, 1)  # of another type than what receives it
    else:
        dist.recv(torch.empty(4, 8, device=where), 0)
        dist.recv(doubles, 0)
    return [*found, other.tolist()]


def heard() -> list:
    """mmengine's broadcast of a moment: over the GPU, and back into a tensor of the CPU, whole and in parts."""
    import torch.distributed as dist

    where, moment = torch.device("cuda", dist.get_rank()), torch.tensor(5.5 + dist.get_rank(), dtype=torch.float64)
    gpus = moment.to(where)
    dist.broadcast(gpus, src=0)
    both = torch.tensor([1.5, 2.5], dtype=torch.float64)
    both[1] += gpus.cpu()
    moment.copy_(gpus.cpu())
    return [moment.item(), both.tolist(), (moment + 1).item()]


def heard_of_nothing() -> list:
    """A tensor of the CPU with one number that another rank has told, and one that nobody knows, on which no shape may depend."""
    import torch.distributed as dist

    where, told = torch.device("cuda", dist.get_rank()), torch.tensor([1.5, 2.5], dtype=torch.float64)
    gpus = torch.tensor(5.5, dtype=torch.float64, device=where)
    dist.broadcast(gpus, src=0)
    told[0] = gpus.cpu()
    assert told.nonzero().shape == (2, 1)
    told[1] = torch.rand(3, device=where).sum().cpu()
    told[0] = gpus.cpu()
    with pytest.raises(NotImplementedError, match="depends on values"):
        told.nonzero()
    return list(map(str, told.tolist()))


def unknown() -> list:
    """What one rank does not know, nobody knows; nor what is not carried, or is too large."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), []
    where = torch.device("cuda", rank)

    def mine(*numbers):
        """Known on the second rank alone."""
        known = torch.tensor(numbers, device=where)
        return known if rank else known.add_(torch.rand(len(numbers), device=where).long())

    own, other = mine(1, 2), torch.zeros(2, dtype=torch.int64, device=where)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        number = mine(0.5)
        dist.all_reduce(number, op=op)
        found.append(number.item())
    for out, told in (
        (mine(3), lambda out: dist.reduce_scatter_tensor(out, own)),
        (other, lambda out: dist.broadcast(out.copy_(own), src=0)),
    ):
        told(out)
        found.append(out.tolist())
    gathered = [torch.ones(2, device=where) for _ in range(2)]
    dist.all_gather(gathered, mine(0.5, 0.5))
    exchanged = torch.ones(2, device=where)
    dist.all_to_all_single(exchanged, torch.ones(2, device=where))
    large = torch.ones(300, device=where)
    dist.all_reduce(large)
    message = torch.ones(2, device=where)
    dist.send(mine(0.5, 0.5), 1) if rank == 0 else dist.recv(message, 0)
    return [*map(str, [*found, *gathered[1].tolist(), *exchanged.tolist(), large[0].item()]), str(message.tolist())]


def chosen_by_another() -> str:
    """The other rank did not know what it sent."""
    import torch.distributed as dist

    mask = torch.tensor([True, False], device=f"cuda:{dist.get_rank()}")
    if dist.get_rank() == 0:
        mask |= torch.rand(2, device=mask.device) > 0
    dist.broadcast(mask, src=0)
    with pytest.raises(NotImplementedError, match="depends on values") as caught:
        mask.nonzero()
    return str(caught.value)


def test_counts_are_those_of_a_run_with_numbers(on_gpus):
    assert on_gpus(told, dry=True) == on_gpus(told)
    assert on_gpus(timed, dry=True) == on_gpus(timed)
    assert on_gpus(sent, dry=True) == on_gpus(sent)
    assert on_gpus(heard, dry=True) == on_gpus(heard) == 2 * [[5.5, [1.5, 8.0], 6.5]]


def test_what_is_not_carried_is_not_known(on_gpus):
    first, second = on_gpus(unknown, dry=True)
    assert first[:-1] == second[:-1] == ["nan", "nan", "[0]", "[0, 0]", *5 * ["nan"]]
    assert (first[-1], second[-1]) == ("[1.0, 1.0]", "[nan, nan]")
    assert on_gpus(heard_of_nothing, dry=True) == 2 * [["nan", "nan"]]
    assert len(on_gpus(chosen_by_another, dry=True)) == 2


@pytest.mark.parametrize("rank, length", [(0, 5), (1, 0)])  # another's broadcast is not known
def test_a_rank_that_is_played_alone_takes_the_others_to_be_like_it(rank, length):
    import torch.distributed as dist

    with virtualgpu.dry_run(rank=rank, world_size=2):
        dist.init_process_group("nccl")
        found = told()
    own = [rank + 1, 10 * rank]
    reduced = [2 * (2 + rank), 2 + rank, 2 + rank, (2 + rank) ** 2]
    assert found == [length, [own, own], 4 * [rank], 2 * [rank], *reduced, 2 * rank, rank, rank, rank == 0]


@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_times_of_a_rank_that_is_played_alone():
    import torch.distributed as dist

    with virtualgpu.dry_run(world_size=2):
        dist.init_process_group("nccl")
        found = timed()
    own = [0.25, 4.0]
    assert found[:15] == [numbers for op in ([0.5, 2], [0.5, 2], [1, 4], [0.5, 2], [0.25, 4]) for numbers in 3 * [op]]
    assert found[15:] == [[own, own], [0.5, 8], 2, own, [own, own], [0.5, 8], [0.5, 8]]


def mean_of_all() -> list:
    """As many programs average what each rank has measured: a sum and a number of samples, in one tensor of float64."""
    import torch.distributed as dist

    where = torch.device("cuda", dist.get_rank())
    loss = torch.rand(3, device=where).mean()
    both = torch.tensor([3 + dist.get_rank(), loss.item()], dtype=torch.float64, device=where)
    dist.barrier(device_ids=[where.index])
    dist.all_reduce(both)
    unknown = torch.rand(2, device=where).double()
    dist.all_reduce(unknown)
    count, total = both.tolist()
    return [int(count), total != total, unknown.isnan().any().item() or unknown.tolist()[0] != unknown.tolist()[0]]


def mean_dry() -> list:
    with virtualgpu.dry_run():
        return mean_of_all()


@pytest.mark.filterwarnings("ignore:a dry run computes shapes")
def test_a_mean_over_all_ranks_goes_by_its_number_of_samples(on_gpus):
    assert on_gpus(mean_dry) == [[7, True, True]] * 2
