"""Process groups: asynchronous work runs on a stream of its own until wait(); each rank has a detector, and its error says which rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.virtualgpu.sanitizer.programs import beside


def raised(program) -> str:
    """What the program's race is called, or ""."""
    from virtualgpu.sanitizer import UnsynchronizedAccessError

    try:
        program()
    except UnsynchronizedAccessError as error:
        return str(error)
    return ""


def ones() -> torch.Tensor:
    return torch.ones(64, device="cuda")


def result_used(wait):
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    x + 1
    work.wait()


def input_overwritten(wait):
    x, out = ones(), torch.empty(128, device="cuda")
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    if wait:
        work.wait()
    x.zero_()
    work.wait()


def waited_for_on_another_stream(wait):
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(torch.cuda.current_stream() if wait else torch.cuda.Stream()):
        work.wait()
    x + 1
    torch.cuda.synchronize()


def made_on_another_stream(wait):
    with beside(False, then=wait):
        x = ones()
    dist.all_reduce(x)
    torch.cuda.synchronize()


def message_on_its_way(wait):
    x = ones()
    work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
    if wait:
        work.wait()
    x.mul_(2)
    work.wait()


def batch_on_its_way(wait):
    x, y, other = ones(), ones(), 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)])
    for work in works if wait else ():
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


RESULT = "all_reduce on a stream of communication of cuda:1 may still be writing"
PROGRAMS = {  # and what the error on rank 1 says where they forget to wait
    result_used: [RESULT, "call wait() on the work that all_reduce returned", "test_collectives.py"],
    input_overwritten: ["may still be reading"],
    waited_for_on_another_stream: [RESULT],
    made_on_another_stream: ["all_reduce on the default stream of cuda:1"],
    message_on_its_way: ["recv from rank 0"],
    batch_on_its_way: ["recv from rank 0"],
    functional: [RESULT],
}


def collectives() -> list[tuple[str, str]]:
    """Of each program: what it raises as it should be, and where it forgets to wait."""
    found = []
    for program in PROGRAMS:
        found.append(tuple(raised(functools.partial(program, wait)) for wait in (True, False)))
        dist.barrier()
        torch.cuda.synchronize()
    return found


def test_collectives_and_messages(on_gpus):
    for rank, found in enumerate(on_gpus(collectives)):
        for (program, messages), (right, forgotten) in zip(PROGRAMS.items(), found, strict=True):
            assert right == "", program
            assert forgotten.startswith(f"rank {rank}: a race: "), (program, forgotten)
            assert rank == 0 or all(message in forgotten for message in messages), (program, forgotten)


def silent() -> str:
    """What needs no wait(): collectives of the default kind, what the host has waited for, what query() has seen."""

    def program():
        x = ones()
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
    from torch.distributed.fsdp import fully_shard

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
    from torch.nn.parallel import DistributedDataParallel

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
