"""Process groups: asynchronous work runs on a stream of its own until wait(); each rank has a detector, and its error says which rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.virtualgpu.sanitizer.programs import raised, rows
from virtualgpu.sanitizer import UnsynchronizedAccessError

RESULT = "all_reduce on a stream of communication of cuda:1 may still be writing"
PROGRAMS = rows(f"""
result used: x=ones(64); w=dist.all_reduce(x, async_op=True); ?w.wait(); x+1; w.wait() | {RESULT}
cured by wait: x=ones(64); w=dist.all_reduce(x, async_op=True); ?w.wait(); x+1; w.wait() | call wait() on the work that all_reduce returned
input overwritten: x=ones(64); y=empty(128); w=dist.all_gather_into_tensor(y, x, async_op=True); ?w.wait(); x.zero_(); w.wait() | may still be reading
waited for on another stream: x=ones(64); w=dist.all_reduce(x, async_op=True); ?w.wait(); !s:w.wait(); x+1 | {RESULT}
made on another stream: s:x=ones(64); ?d<s; dist.all_reduce(x) | all_reduce on the default stream of cuda:1
message on its way: x=ones(64); w=message(x); ?w.wait(); x.mul_(2); w.wait() | recv from rank 0
batch on its way: y=ones(64); w=exchanged(ones(64), y); ?[one.wait() for one in w]; y+1; [one.wait() for one in w] | recv from rank 0
functional: x=reduced(ones(64)); ?x=waited(x); x+1; waited(x) | {RESULT}
""")
SILENT = (
    "x=ones(64); dist.all_reduce(x); x.add_(1); dist.all_reduce(x, async_op=True); torch.cuda.synchronize(); x.add_(1)",
    "x=ones(64); w=dist.all_reduce(x, async_op=True); [None for _ in iter(w.is_completed, True)]; x.sum().item()",
    "x=[None, None]; dist.all_gather_object(x, {'rank': dist.get_rank()})",
    "x=on_its_way(); dist.barrier(); x[0]",
)


def collectives() -> tuple[list[tuple[str, str]], list[str]]:
    """Of each program: what it raises as it should be, and where it forgets to wait; and of those that need not wait."""
    found = []
    for program, _ in PROGRAMS.values():
        found.append((raised(program, waits=True), raised(program)))
        dist.barrier()
        torch.cuda.synchronize()
    return found, [raised(program) for program in SILENT]


def test_collectives_and_messages(on_gpus):
    for rank, (found, silent) in enumerate(on_gpus(collectives)):
        for (name, (_, words)), (right, forgotten) in zip(PROGRAMS.items(), found, strict=True):
            assert right == "", name
            assert forgotten.startswith(f"rank {rank}: a race: "), (name, forgotten)
            assert rank == 0 or words in forgotten, (name, forgotten)
        assert silent == [""] * len(SILENT)


def told(function) -> str:
    """What it raises."""
    try:
        function()
    except UnsynchronizedAccessError as error:
        return str(error)
    return ""


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

    return told(steps)


def test_fsdp2_is_silent_and_would_not_be_without_its_waiting(on_gpus):
    assert on_gpus(sharded, False) == ["", ""]
    assert all("a race: " in error for error in on_gpus(sharded, True))


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
    error = told(lambda: model(torch.ones(4, 64, device="cuda")).sum().backward())
    for work in works:
        work.wait()
    return error


@pytest.mark.parametrize("forget", [False, True])
def test_ddp_is_silent_unless_a_hook_forgets(on_gpus, forget):
    assert [bool(error) for error in on_gpus(replicated, forget)] == [forget] * 2
