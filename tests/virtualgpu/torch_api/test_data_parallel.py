"""nn.DataParallel and torch.cuda.comm: results, places, memory and time."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.cuda import comm
from torch.nn import functional as F

import virtualgpu
from virtualgpu.hardware.machine import Fabric
from virtualgpu.timing import nccl
from virtualgpu.timing.host import BROADCAST, LOCKED, REPLICATED

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x, factor=1.0):
        assert self.first.weight.device == self.scale.device == x.device
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale * factor


class ByHand(nn.Module):
    """What DataParallel does, in one thread: each half by itself, with the statistics of the first kept."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        halves = x.chunk(2)
        first = self.module(halves[0])
        kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        second = self.module(halves[1])
        for name, buffer in self.module.named_buffers():
            buffer.data = kept[name]
        return torch.cat([first, second])


def test_data_parallel_trains_as_by_hand(gpus):
    def trained(wrap):
        torch.manual_seed(0)
        model = wrap(Net().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(8, 4).cuda(), torch.randint(0, 2, (8,)).cuda()
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, losses

    model, losses = trained(nn.DataParallel)
    expected, theirs = trained(ByHand)
    assert losses == pytest.approx(theirs, rel=1e-5) and losses[2] < losses[0]
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert {tensor.device for p in model.parameters() for tensor in (p, p.grad)} == {ZERO}


class Look(nn.Linear):
    """Notes where it computes."""

    seen: ClassVar[list] = []

    def forward(self, x, **named):
        here = x.device, tuple(x.shape), self.weight.device, named["key"].device, torch.cuda.current_device()
        self.seen.append(here)
        return {"out": super().forward(x), "n": x.sum()}


def test_each_gpu_gets_its_part(gpus):
    Look.seen.clear()
    model = nn.DataParallel(Look(4, 4).cuda())
    found = model(torch.ones(5, 4), key=torch.ones(5, 1))  # from the CPU
    assert sorted(Look.seen, key=str) == [(ZERO, (3, 4), ZERO, ZERO, 0), (ONE, (2, 4), ONE, ONE, 1)]
    assert found["out"].shape == (5, 4) and found["out"].device == ZERO and found["n"].tolist() == [12, 8]
    Look.seen.clear()
    model(torch.ones(1, 4), key=torch.ones(1, 1))  # less than there are GPUs
    assert [row[0] for row in Look.seen] == [ZERO]
    single = nn.DataParallel(Look(4, 4).cuda(), device_ids=[0])
    assert single(torch.ones(4, 4).cuda(), key=torch.ones(4, 1).cuda())["out"].device == ZERO


def test_outputs_and_devices_can_be_chosen(without_workspaces):
    virtualgpu.gpus(3)
    model = nn.DataParallel(nn.Linear(4, 4).to("cuda:2"), device_ids=[2, 0], output_device=1)
    out = model(torch.ones(6, 4, device="cuda:2"))
    assert out.device == ONE
    out.sum().backward()
    assert model.module.weight.grad.device == torch.device("cuda:2") and model.module.bias.grad.tolist() == [6] * 4
    assert torch.cuda.memory_allocated(0) == 0  # the replica has gone


class Fails(nn.Linear):
    def forward(self, x):
        return super().forward(x.to("cuda:0"))


def test_errors_name_what_is_wrong(gpus):
    with pytest.raises(RuntimeError, match=r"parameters and buffers on device cuda:0 \(device_ids\[0\]\)"):
        nn.DataParallel(nn.Linear(4, 4).to(ONE))(torch.ones(4, 4))
    words = r"(?s)Caught RuntimeError in replica 1 on device 1\..*Expected all tensors to be on the same device"
    with pytest.raises(RuntimeError, match=words):
        nn.DataParallel(Fails(4, 4).cuda())(torch.ones(4, 4))


@pytest.mark.parametrize("dry", [False, True])
def test_memory_is_uneven_as_in_the_notes(gpus, without_workspaces, dry):
    """The first GPU has the parameters, the gradients and all outputs; the second a replica, and only during the step."""
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        model = nn.DataParallel(nn.Linear(1024, 4096, bias=False).cuda())
        weights = 1024 * 4096 * 4
        x = torch.ones(2048, 1024, device="cuda")
        torch.cuda.reset_peak_memory_stats(0), torch.cuda.reset_peak_memory_stats(1)
        out = model(x)
        half_in, half_out = x.nbytes // 2, 2048 * 4096 * 4 // 2
        assert torch.cuda.memory_allocated(1) == half_in  # kept for the backward pass; nothing asks for x's gradient
        assert torch.cuda.max_memory_allocated(1) == weights + half_in + half_out
        assert torch.cuda.memory_allocated(0) == weights + x.nbytes + 2 * half_out
        out.sum().backward()
        del out
        assert torch.cuda.memory_allocated(1) == 0
        assert torch.cuda.memory_allocated(0) == 2 * weights + x.nbytes


# -- the parts


def test_comm_broadcast(gpus):
    x = torch.arange(4.0, device=ZERO)
    copies = comm.broadcast(x, (0, 1))
    assert [copy.device for copy in copies] == [ZERO, ONE] and copies[0].data_ptr() == x.data_ptr()
    assert [t.tolist() for t in copies] == [[0, 1, 2, 3]] * 2
    assert comm.broadcast(torch.ones(2), (1, 0))[0].device == ONE
    with pytest.raises(RuntimeError, match=r"Expected first device in `devices` to be the same"):
        comm.broadcast(x, (1, 0))
    tensors = [torch.full((n,), float(n), device=ZERO) for n in (3, 5, 7)] + [torch.arange(4, device=ZERO)]
    first, second = comm.broadcast_coalesced(tensors, (0, 1))
    assert [t.device for t in second] == [ONE] * 4 and second[3].dtype == torch.int64
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(first, second, strict=True))


def test_comm_scatter_gather_and_reduce(gpus):
    x = torch.arange(6.0).view(3, 2)
    parts = comm.scatter(x, (0, 1), chunk_sizes=(1, 2))
    assert [p.shape for p in parts] == [(1, 2), (2, 2)] and [p.device for p in parts] == [ZERO, ONE]
    whole = comm.gather(parts, destination=ONE)
    assert torch.equal(whole.cpu(), x) and whole.device == ONE
    assert comm.gather(parts, destination="cpu").device == CPU
    columns = comm.scatter(x.cuda(), (0, 1), dim=1)
    assert [c.flatten().tolist() for c in columns] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(RuntimeError, match="invalid shape"):
        comm.gather([torch.ones(2, 2, device=ZERO), torch.ones(2, 3, device=ONE)])
    parts = [torch.full((3,), float(i + 1), device=f"cuda:{i}") for i in range(2)]
    total = comm.reduce_add(parts, destination=1)
    assert total.device == ONE and total.tolist() == [3, 3, 3]
    (coalesced,) = comm.reduce_add_coalesced([[parts[0]], [parts[1]]], destination=0)
    assert coalesced.device == ZERO and coalesced.tolist() == [3, 3, 3]
    with pytest.raises(AssertionError, match="expects all inputs to be on GPUs"):
        comm.reduce_add([torch.ones(2), torch.ones(2)])


# -- time


def spans_of(clock, work) -> list[tuple]:
    clock.wait()
    with virtualgpu.recording() as spans:
        work()
    return [(span.kind, span.gpu, span.end - span.start) for span in spans]


def test_a_broadcast_is_one_kernel_of_nccl(gpus):
    """On all GPUs at once, as torch/csrc/cuda/comm.cpp has it where NCCL takes the tensors."""
    x, fabric = torch.ones(1 << 22, device=ZERO), Fabric.of(gpus.gpus[0].spec)
    lasts = pytest.approx(nccl.seconds("broadcast", x.nbytes, 2, fabric))
    assert spans_of(gpus.clock, lambda: comm.broadcast(x, (0, 1))) == [("communication", gpu, lasts) for gpu in (0, 1)]
    columns = torch.ones(1 << 11, 1 << 11, device=ZERO).t()  # not contiguous: a copy, which takes the link's time
    link = pytest.approx(gpus.gpus[0].spec.peer.seconds(x.nbytes))
    assert spans_of(gpus.clock, lambda: comm.broadcast(columns, (0, 1)))[-1] == ("copy", 1, link)


def test_a_reduction_needs_room_for_its_result_alone(gpus):
    parts = [torch.full((1 << 22,), float(i + 1), device=f"cuda:{i}") for i in range(2)]
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    found = []
    kinds = [kind for kind, *_ in spans_of(gpus.clock, lambda: found.append(comm.reduce_add(parts, destination=0)))]
    assert torch.cuda.max_memory_allocated(0) - before == parts[0].nbytes
    assert kinds == ["communication"] * 2 and found.pop().cpu().unique().tolist() == [3]
    strided = [part.view(1 << 11, 1 << 11).t() for part in parts]
    assert comm.reduce_add(strided, destination=0).cpu().unique().tolist() == [3]
    assert torch.cuda.max_memory_allocated(0) - before == 2 * parts[0].nbytes  # a copy, and the sum
    with pytest.raises(NotImplementedError, match="another operation than SUM"):
        torch.cuda.nccl.reduce(parts, op=2)


def test_a_broadcast_begins_when_all_have_come(gpus):
    """A GPU that waits in it is busy, and not computing."""
    clock = gpus.clock
    x = torch.ones(2000, 2000, device=ONE)
    clock.wait()
    busy, computing = clock.busy[0], clock.computing[0]
    with virtualgpu.recording() as spans:
        for _ in range(5):
            x @ x
        comm.broadcast(torch.ones(1 << 20, device=ZERO), (0, 1))
        clock.wait()
    (waits,) = [span for span in spans if span.kind == "waiting"]
    (begin,) = {span.start for span in spans if span.kind == "communication"}
    assert waits.gpu == 0 and waits.end == begin == max(span.end for span in spans if span.name == "mm")
    assert clock.busy[0] - busy > 5 * (clock.computing[0] - computing)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_what_data_parallel_costs_the_host(replicas):
    """Threads share Python's lock; a broadcast handles each tensor, a replica each module."""
    virtualgpu.gpus(4)
    clock = virtualgpu.machine().clock
    model = nn.Sequential(*[nn.ReLU() for _ in range(500)], nn.Linear(1, 1)).cuda()
    parallel = nn.DataParallel(model, range(replicas))

    def hosts_seconds(model) -> float:
        with torch.no_grad():
            start = clock.host
            model(torch.ones(12, 1, device=ZERO))
            return (clock.host - start) / clock.costs.forward

    hosts_seconds(parallel)
    alone, together = hosts_seconds(model), hosts_seconds(parallel)
    modules, tensors, threads = 502, 2, max(1.0, LOCKED * replicas)
    expected = alone if replicas == 1 else threads * alone + REPLICATED * replicas * modules + BROADCAST * tensors
    assert together == pytest.approx(expected, rel=0.01)


def test_a_step_of_data_parallel_takes_the_same_time_each_run(gpus):
    def step() -> tuple:
        virtualgpu.reset()
        virtualgpu.gpus(2)
        clock = virtualgpu.machine().clock
        model = nn.DataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda())
        for _ in range(2):
            model(torch.ones(64, 512, device=ZERO)).sum().backward()
        clock.wait()
        return clock.host, clock.busy, clock.computing

    assert step() == step() == step()
