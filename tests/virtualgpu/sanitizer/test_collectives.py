"""Process groups: asynchronous work runs on a stream of its own until wait(); each rank has a detector, and its error says which rank."""

import functools

import pytest
import torch
from torch import nn


def raised(program) -> str:
    """What the program's race is called, or ""."""
    from virtualgpu.sanitizer import UnsynchronizedAccessError

    try:
        program()
    except UnsynchronizedAccessError as error:
        return str(error)
    return ""


def collectives() -> dict[str, tuple[str, str]]:
    """Of each program: what it raises as it should be, and where it forgets to wait."""
    import torch.distributed as dist

    rank = dist.get_rank()
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    side = torch.cuda.Stream()

    def ones():
        return torch.ones(64, device=device)

    def result_used(wait):
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        if wait:
            work.wait()
        x + 1
        work.wait()

    def input_overwritten(wait):
        x, out = ones(), torch.empty(128, device=device)
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        if wait:
            work.wait()
        x.zero_()
        work.wait()

    def waited_for_on_another_stream(wait):
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        with torch.cuda.stream(torch.cuda.current_stream() if wait else side):
            work.wait()
        x + 1
        torch.cuda.synchronize()

    def made_on_another_stream(wait):
        with torch.cuda.stream(side):
            x = ones()
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        dist.all_reduce(x)
        torch.cuda.synchronize()

    def message_on_its_way(wait):
        x = ones()
        works = [dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)]
        if wait:
            works[0].wait()
        x.mul_(2)
        works[0].wait()

    def batch_on_its_way(wait):
        x, y = ones(), ones()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])
        if wait:
            for work in works:
                work.wait()
        y + 1
        for work in works:
            work.wait()

    def functional(wait):
        x = torch.ops._c10d_functional.all_reduce(ones(), "sum", dist.group.WORLD.group_name)
        if wait:
            x = torch.ops._c10d_functional.wait_tensor(x)
        x + 1
        torch.ops._c10d_functional.wait_tensor(x)

    programs = [result_used, input_overwritten, waited_for_on_another_stream, made_on_another_stream]
    programs += [message_on_its_way, batch_on_its_way, functional]
    found = {}
    for program in programs:
        told = tuple(raised(functools.partial(program, wait)) for wait in (True, False))
        dist.barrier()
        torch.cuda.synchronize()
        found[program.__name__] = told
    return found


def test_collectives_and_messages(on_gpus):
    for rank, found in enumerate(on_gpus(collectives)):
        for name, (right, forgotten) in found.items():
            assert right == "", name
            assert forgotten.startswith(f"rank {rank}: a race: "), (name, forgotten)
    assert "all_reduce on a stream of communication of cuda:1 may still be writing" in found["result_used"][1]
    assert "call wait() on the work that all_reduce returned" in found["result_used"][1]
    assert "recv from rank 0" in found["message_on_its_way"][1]
    assert "test_collectives.py" in found["result_used"][1]


def silent() -> str:
    """What needs no wait(): collectives of the default kind, what the host has waited for, what query() has seen."""
    import torch.distributed as dist

    def program():
        device = f"cuda:{dist.get_rank()}"
        torch.cuda.set_device(dist.get_rank())
        x = torch.ones(64, device=device)
        dist.all_reduce(x)
        x.add_(1)
        dist.all_reduce(x, async_op=True)
        torch.cuda.synchronize()
        x.add_(1)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        assert x.sum().item() == 64 * 14
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        host = x.to("cpu", non_blocking=True)
        dist.barrier()
        assert host[0] == 14

    return raised(program)


def test_what_needs_no_wait_is_silent(on_gpus):
    assert on_gpus(silent) == ["", ""]


def sharded(forget: bool) -> str:
    """FSDP2 works on four streams; without their waiting it would be wrong."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if forget:
        torch.cuda.Stream.wait_event = lambda *_: None

    def steps():
        for _ in range(2):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return raised(steps)


def test_fsdp2_is_silent_and_would_not_be_without_its_waiting(on_gpus):
    assert on_gpus(sharded, False) == ["", ""]
    assert all("a race: " in told for told in on_gpus(sharded, True))


def replicated(forget: bool) -> str:
    """DDP, and one whose hook uses what it has not waited for."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)).cuda(), bucket_cap_mb=0.001)
    works = []

    def hook(state, bucket):
        works.append(dist.all_reduce(bucket.buffer(), async_op=True))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if forget:
        model.register_comm_hook(None, hook)
    told = raised(lambda: model(torch.ones(4, 64, device="cuda")).sum().backward())
    for work in works:
        work.wait()
    return told


@pytest.mark.parametrize("forget", [False, True])
def test_ddp_is_silent_unless_a_hook_forgets(on_gpus, forget):
    assert [bool(told) for told in on_gpus(replicated, forget)] == [forget] * 2
