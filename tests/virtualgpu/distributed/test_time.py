"""The clocks of several ranks: when collectives begin, what they cost, what kernels hide; the same in every run."""

import random
import threading
import time

import pytest
import torch

import virtualgpu
from virtualgpu.engine.machine import GAP
from virtualgpu.hardware.network import Fabric
from virtualgpu.monitor import VirtualSource
from virtualgpu.run.ranks import launch
from virtualgpu.timing import nccl


def spans_of(program):
    """What this rank's GPU did, with the real processes held up at random."""

    def run(*args):
        threading.Event().wait(random.random() / 20)  # time.sleep would pass on the simulated clock
        with virtualgpu.recording() as spans:
            program(*args)
            torch.cuda.synchronize()
        return [(span.kind, span.name, span.start, span.end, span.stream) for span in spans]

    return run


def uneven_ranks():
    """What this rank's GPU came to: (busy, computing, time), how it waited: [(name, start, end), ...], and what a source reads:
    (utilization, computing)."""
    from torch import distributed as dist

    rank = dist.get_rank()
    clock = virtualgpu.machine().clock
    x = torch.ones(2000, 2000, device=f"cuda:{rank}")
    torch.cuda.synchronize()
    before, computing, start, source = (
        clock.busy[rank],
        clock.computing[rank],
        clock.host,
        VirtualSource(virtualgpu.machine()),
    )
    with virtualgpu.recording() as spans:
        for _ in range(1 + 9 * rank):
            x @ x
        dist.all_reduce(x)
        torch.cuda.synchronize()
    waits = [(span.name, span.start, span.end) for span in spans if span.kind == "waiting"]
    return clock.busy[rank] - before, clock.computing[rank] - computing, clock.host - start, waits, source.read()[rank]


def test_a_gpu_that_waits_in_a_collective_is_busy(on_gpus):
    """As nvidia-smi and NVML count NCCL's kernels; computing is the other figure."""
    zero, one = on_gpus(uneven_ranks, dry=True)
    for busy, computing, seconds, _, read in (zero, one):
        assert 0.97 * seconds < busy <= seconds and computing < busy
        assert read == (
            pytest.approx(100 * busy / seconds, rel=0.02),
            pytest.approx(100 * computing / seconds, rel=0.02),
        )
    assert 5 * zero[1] < one[1] and zero[2] == pytest.approx(one[2], rel=0.02)
    ((name, start, end),) = zero[3]
    assert name == "all_reduce 15.26 MiB (waiting)" and end - start > 0.5 * zero[2] and not one[3]


def kernels_beside():
    from torch import distributed as dist

    x = torch.ones(4000, 4000, device=f"cuda:{dist.get_rank()}")
    dist.barrier()
    early = dist.all_reduce(torch.ones(1 << 22, device=x.device), async_op=True)
    for _ in range(10):
        x @ x
    early.wait()
    torch.relu(x)


def test_kernels_beside_a_collective_do_without_its_processors(on_gpus):
    """A channel of NCCL holds one of the 40 multiprocessors of a T4; it opens two there."""
    zero, one = on_gpus(spans_of(kernels_beside), dry=True)
    collective = communication(zero)[-1]
    last, after = [span for span in zero if span[1] == "mm"][-1], next(span for span in zero if span[1] == "relu")
    assert collective[3] < last[3]
    assert after[2] - last[3] - GAP == pytest.approx((collective[3] - collective[2]) * 2 / 40, rel=1e-3) and zero == one


def communication(spans) -> list[tuple]:
    return [span for span in spans if span[0] == "communication"]


def uneven_work(kernels: int):
    import torch.distributed as dist

    rank = dist.get_rank()
    x = torch.ones(1000, 1000, device=f"cuda:{rank}")
    dist.barrier()
    for _ in range(kernels * (1 + rank)):
        x = x @ x
        x.zero_()
    dist.all_reduce(x)
    early = dist.all_reduce(torch.ones(1 << 22, device=x.device), async_op=True)
    x @ x
    early.wait()
    x @ x


def test_a_collective_begins_when_the_last_rank_has_come(on_gpus):
    zero, one = on_gpus(spans_of(uneven_work), 5)
    (_, name, begin, end, stream), (*_, second_begin, second_end, own) = communication(zero)[-2:]
    assert communication(zero) == communication(one)
    assert name == "all_reduce 3.815 MiB" and stream == 0 and own != 0
    products = [span for span in one if span[1] == "mm"]
    fills = [span for span in one if span[1] == "zero_" and span[3] <= begin]
    assert begin == fills[-1][3]  # rank 1 has twice the work
    assert end - begin == pytest.approx(
        nccl.seconds("all_reduce", 4_000_000, 2, Fabric.of(virtualgpu.SPECS["T4"])), rel=1e-9
    )
    beside, after = products[-2:]
    assert second_begin >= end and beside[2] < second_end  # an asynchronous one runs beside the kernels
    assert after[2] >= second_end  # and what comes after wait() after it


def ddp_steps(cap: int):
    from torch import nn
    from torch.distributed import get_rank
    from torch.nn.parallel import DistributedDataParallel

    rank = get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(rank), device_ids=[rank], bucket_cap_mb=cap
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(2048 * (1 + rank), 512, device=rank)).sum().backward()
        optimizer.step()


def test_buckets_overlap_the_backward_pass(with_numbers):
    zero, one = with_numbers["ddp"]
    assert communication(zero) == communication(one)
    buckets = [span for span in communication(one) if span[1].startswith("all_reduce")]
    assert len(buckets) == 1 + 4  # the first step has one bucket, as DDP has it; then 2 MiB each
    backward = [span for span in one if span[0] == "backward"]
    first, *_, last = buckets[1:]
    after = [span for span in backward if span[2] >= first[2]]
    assert after[0][2] < first[3] and len(after) > 10  # kernels of the backward pass run beside it
    step = next(span for span in one[::-1] if span[0] == "optimizer")
    assert step[2] >= last[3]  # the optimizer waits for the last


def fsdp_steps():
    from torch import nn
    from torch.distributed import get_rank
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(get_rank())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4096, 512, device=get_rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(dry: bool) -> dict[str, list]:
    """What each rank's GPU did in the steps of DDP and of FSDP2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELPERS_GPUS", "virtual")
        virtualgpu.reset()
        virtualgpu.gpus(2, like="T4")
        try:
            return {
                "ddp": launch(spans_of(ddp_steps), 2, nprocs=2, dry=dry),
                "fsdp": launch(spans_of(fsdp_steps), nprocs=2, dry=dry),
            }
        finally:
            virtualgpu.reset()


@pytest.fixture(scope="module")
def with_numbers():
    return told(dry=False)


@pytest.fixture(scope="module")
def without():
    """Two runs."""
    return told(dry=True), told(dry=True)


def test_every_run_tells_the_same_times(without):
    assert without[0] == without[1]


def test_fsdp_gathers_the_next_layer_beside_the_kernels(with_numbers):
    zero, one = with_numbers["fsdp"]
    assert communication(zero) == communication(one)
    gathers = [span for span in communication(zero) if span[1].startswith("all_gather")]
    kernels = [span for span in zero if span[0] in ("forward", "backward")]
    hidden = [g for g in gathers if any(k[2] < g[3] and g[2] < k[3] for k in kernels)]
    assert len(hidden) >= len(gathers) // 2


def test_a_dry_run_of_several_ranks_tells_the_same_times(with_numbers, without):
    """With the comparison of shapes that DDP's constructor makes, and whose values a dry run has not."""

    def without_names(ranks):  # of a value that is read, and is not there
        return [[(kind, *span) if kind != "copy" else (kind, *span[1:]) for kind, *span in spans] for spans in ranks]

    for dry in without:
        assert without_names(with_numbers["ddp"]) == without_names(dry["ddp"])
        assert with_numbers["fsdp"] == dry["fsdp"]


def late_rank():
    """Simulated seconds that this rank needs for an all_reduce, where rank 1 sleeps before it."""
    from torch import distributed as dist

    clock, x = virtualgpu.machine().clock, torch.ones(10, device=f"cuda:{dist.get_rank()}")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    start = clock.host
    if dist.get_rank() == 1:
        time.sleep(0.05)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    return clock.host - start


def test_all_wait_for_a_rank_that_sleeps(on_gpus):
    assert on_gpus(late_rank) == [pytest.approx(0.05, abs=1e-3)] * 2
