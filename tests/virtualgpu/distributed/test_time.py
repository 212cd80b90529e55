"""The clocks of several ranks: when collectives begin, what they cost, what kernels hide; the same in every run, and without numbers."""

import functools
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import virtualgpu
from tests.virtualgpu.distributed.conftest import Rows, started
from virtualgpu.engine.machine import GAP
from virtualgpu.hardware.machine import Fabric
from virtualgpu.monitor import VirtualSource
from virtualgpu.timing import nccl

TWO, DRY = Rows(), Rows(dry=True)


def spans_of(program):
    """What this rank's GPU did, with the real processes held up at random."""

    @functools.wraps(program)
    def run():
        threading.Event().wait(random.random() / 20)  # time.sleep would pass on the simulated clock
        dist.barrier()
        torch.cuda.synchronize()
        start = virtualgpu.machine().clock.host
        with virtualgpu.recording() as spans:
            program()
            torch.cuda.synchronize()
        return [(s.kind, s.name, round(s.start - start, 12), round(s.end - start, 12), s.stream) for s in spans]

    return run


def communication(spans, kind: str = "") -> list[tuple]:
    return [span for span in spans if span[0] == "communication" and span[1].startswith(kind)]


@DRY.row
def uneven_ranks():
    """What this rank's GPU came to: (busy, computing, time), how it waited: [(name, start, end), ...], and what a source reads:
    (utilization, computing)."""
    rank, clock = dist.get_rank(), virtualgpu.machine().clock
    x = torch.ones(2000, 2000, device=f"cuda:{rank}")
    torch.cuda.synchronize()
    before, computing, start = clock.busy[rank], clock.computing[rank], clock.host
    source = VirtualSource(virtualgpu.machine())
    with virtualgpu.recording() as spans:
        for _ in range(1 + 9 * rank):
            x @ x
        dist.all_reduce(x)
        torch.cuda.synchronize()
    waits = [(span.name, span.start, span.end) for span in spans if span.kind == "waiting"]
    return clock.busy[rank] - before, clock.computing[rank] - computing, clock.host - start, waits, source.read()[rank]


def test_a_gpu_that_waits_in_a_collective_is_busy():
    """As nvidia-smi and NVML count NCCL's kernels; computing is the other figure."""
    zero, one = DRY[uneven_ranks]
    for busy, computing, seconds, _, read in (zero, one):
        assert 0.97 * seconds < busy <= seconds and computing < busy
        shares = [100 * part / seconds for part in (busy, computing)]
        assert read == tuple(pytest.approx(share, rel=0.02) for share in shares)
    assert 5 * zero[1] < one[1] and zero[2] == pytest.approx(one[2], rel=0.02)
    ((name, start, end),) = zero[3]
    assert name == "all_reduce 15.26 MiB (waiting)" and end - start > 0.5 * zero[2] and not one[3]


@DRY.row
@spans_of
def kernels_beside():
    x = torch.ones(4000, 4000, device=f"cuda:{dist.get_rank()}")
    early = dist.all_reduce(torch.ones(1 << 22, device=x.device), async_op=True)
    for _ in range(10):
        x @ x
    early.wait()
    torch.relu(x)


def test_kernels_beside_a_collective_do_without_its_processors():
    """A channel of NCCL holds one of the 40 multiprocessors of a T4; it opens two there."""
    zero, one = DRY[kernels_beside]
    (collective,) = communication(zero)
    last, after = [span for span in zero if span[1] == "mm"][-1], next(span for span in zero if span[1] == "relu")
    assert collective[3] < last[3]
    assert after[2] - last[3] - GAP == pytest.approx((collective[3] - collective[2]) * 2 / 40, rel=1e-3) and zero == one


@TWO.row
@spans_of
def uneven_work():
    rank = dist.get_rank()
    x = torch.ones(1000, 1000, device=f"cuda:{rank}")
    for _ in range(5 * (1 + rank)):
        x = x @ x
        x.zero_()
    dist.all_reduce(x)
    early = dist.all_reduce(torch.ones(1 << 22, device=x.device), async_op=True)
    x @ x
    early.wait()
    x @ x


def test_a_collective_begins_when_the_last_rank_has_come():
    zero, one = TWO[uneven_work]
    (_, name, begin, end, stream), (*_, second_begin, second_end, other) = communication(zero)
    assert communication(zero) == communication(one)
    assert name == "all_reduce 3.815 MiB" and stream == 0 and other != 0
    products = [span for span in one if span[1] == "mm"]
    fills = [span for span in one if span[1] == "zero_" and span[3] <= begin]
    assert begin == fills[-1][3]  # rank 1 has twice the work
    lasts = nccl.seconds("all_reduce", 4_000_000, 2, Fabric.of(virtualgpu.SPECS["T4"]))
    assert end - begin == pytest.approx(lasts, abs=2e-12)
    beside, after = products[-2:]
    assert second_begin >= end and beside[2] < second_end  # an asynchronous one runs beside the kernels
    assert after[2] >= second_end  # and what comes after wait() after it


@TWO.gives(pytest.approx(0.05, abs=1e-3))
def late_rank():
    """Simulated seconds that this rank needs for an all_reduce, where rank 1 sleeps before it."""
    clock, x = virtualgpu.machine().clock, torch.ones(10, device=f"cuda:{dist.get_rank()}")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    start = clock.host
    if dist.get_rank() == 1:
        time.sleep(0.05)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    return clock.host - start


test_two_ranks = TWO.test()


# -- steps of DDP and of FSDP2


@spans_of
def ddp_steps():
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(rank)
    model = nn.parallel.DistributedDataParallel(layers, device_ids=[rank], bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(2048 * (1 + rank), 512, device=rank)).sum().backward()
        optimizer.step()


@spans_of
def fsdp_steps():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(dist.get_rank())
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4096, 512, device=dist.get_rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


STEPS = {"ddp": ddp_steps, "fsdp": fsdp_steps}


@pytest.fixture(scope="module")
def with_numbers():
    return started(STEPS)


def test_buckets_overlap_the_backward_pass(with_numbers):
    zero, one = with_numbers["ddp"]
    assert communication(zero) == communication(one)
    buckets = communication(one, "all_reduce")
    assert len(buckets) == 1 + 4  # the first step has one bucket, as DDP has it; then 2 MiB each
    first, *_, last = buckets[1:]
    after = [span for span in one if span[0] == "backward" and span[2] >= first[2]]
    assert after[0][2] < first[3] and len(after) > 10  # kernels of the backward pass run beside it
    step = next(span for span in one[::-1] if span[0] == "optimizer")
    assert step[2] >= last[3]  # the optimizer waits for the last


def test_fsdp_gathers_the_next_layer_beside_the_kernels(with_numbers):
    zero, one = with_numbers["fsdp"]
    assert communication(zero) == communication(one)
    gathers = communication(zero, "all_gather")
    kernels = [span for span in zero if span[0] in ("forward", "backward")]
    hidden = [g for g in gathers if any(k[2] < g[3] and g[2] < k[3] for k in kernels)]
    assert len(hidden) >= len(gathers) // 2


def test_every_run_tells_the_same_times_also_a_dry_one(with_numbers):
    """With the comparison of shapes that DDP's constructor makes, and whose values a dry run has not."""
    first, second = started(STEPS, dry=True), started(STEPS, dry=True)
    assert first == second

    def without_names(ranks):  # of a value that is read, and is not there
        return [[(kind, *span) if kind != "copy" else (kind, *span[1:]) for kind, *span in spans] for spans in ranks]

    for name, ranks in with_numbers.items():
        assert without_names(ranks) == without_names(first[name])
