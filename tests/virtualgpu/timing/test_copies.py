"""Copies between a GPU and its host, pinned and not, and between GPUs: what others measured, not what a link promises."""

import pytest
import torch

import virtualgpu
from virtualgpu.hardware import datasheet
from virtualgpu.hardware.datasheet import PCIE3, PCIE4, PCIE5, Link

NBYTES, LAST = 1 << 28, torch.channels_last


def rate(copy) -> float:
    """GB/s of a copy of NBYTES."""
    clock = virtualgpu.machine().clock
    torch.cuda.synchronize()
    start = clock.host
    copy()
    torch.cuda.synchronize()
    return NBYTES / (clock.host - start) / 1e9


@pytest.fixture(params=["dry", "numbers"])
def run(request):
    return virtualgpu.dry_run if request.param == "dry" else virtualgpu.gpus


@pytest.mark.parametrize(
    "card, clock, rates",
    [
        ("T4", None, (8.66, 12.6, 7.9, 12.9)),
        ("A100", None, (10.0, 24.8, 10.8, 25.8)),
        ("H100", None, (18.5, 54.4, 18.5, 53.4)),
        ("A100", "datasheet", (31.45,) * 4),
    ],
)
def test_pinned_memory_is_faster(run, card, clock, rates):
    with run(1, like=card, clock=clock):
        host, gpu = torch.ones(NBYTES, dtype=torch.uint8), torch.ones(NBYTES, dtype=torch.uint8, device="cuda")
        pinned = host.pin_memory()
        copies = [
            lambda: host.to("cuda"),
            lambda: pinned.cuda(non_blocking=True),
            lambda: gpu.cpu(),
            lambda: pinned.copy_(gpu, non_blocking=True),
        ]
        assert [rate(copy) for copy in copies] == pytest.approx(rates, rel=0.005)
        same = [
            lambda: gpu.copy_(host, non_blocking=True),
            lambda: gpu.copy_(pinned),
            lambda: host.copy_(gpu),
            lambda: gpu.to("cpu", non_blocking=True),  # PyTorch pins where it copies to
        ]
        assert [rate(copy) for copy in same] == pytest.approx(rates, rel=0.005)
        assert rate(lambda: host.untyped_storage().cuda()) == pytest.approx(rates[0], rel=0.005)
        assert rate(lambda: pinned.untyped_storage().cuda()) == pytest.approx(rates[1], rel=0.005)


@pytest.mark.parametrize(
    "cards, clock, expected, peers",
    [
        ("V100", None, 47.9, True),
        ("A100", None, 274, True),
        ("H200", None, 376, True),
        ("B200", None, 752, True),  # as of the H100's NVLink
        ("RTX A6000", None, 25.2, True),
        ("P100", None, 12.6, True),
        ("T4", None, 4.4, False),  # through the host's memory
        ("TITAN RTX NVLink", None, 47.9, True),
        ("A100", "datasheet", 300, True),
        ("V100,T4", None, 4.4, False),  # as fast as the slower one is through the host's memory
        ("A100,V100", None, 12.6, True),  # no NVLink joins unlike cards: PCI Express, of the older generation
    ],
)
def test_copies_between_gpus_reach_what_others_measured(run, cards, clock, expected, peers):
    with run(2, like=cards, clock=clock):
        for source, target in ((0, 1), (1, 0)):
            here = torch.ones(NBYTES, dtype=torch.uint8, device=source)
            torch.cuda.synchronize(source)
            assert rate(lambda here=here, target=target: here.to(target)) == pytest.approx(expected, rel=0.02)
        assert torch.cuda.can_device_access_peer(0, 1) is peers


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_slot_with_fewer_lanes_and_one_that_nobody_measured(way):
    half = Link(PCIE4.bandwidth / 2, 10e-6)
    assert datasheet.to_host(half, way, True).bandwidth < datasheet.to_host(PCIE4, way, True).bandwidth
    for link in (PCIE3, half, PCIE4, PCIE5, Link(4e9, 10e-6)):
        pageable, pinned = (datasheet.to_host(link, way, memory) for memory in (False, True))
        assert pageable.bandwidth <= pinned.bandwidth < link.bandwidth and pinned.latency == link.latency
    chip_to_chip = Link(450e9, 2e-6)
    assert datasheet.to_host(chip_to_chip, way, False) == chip_to_chip


def from_gpu():
    return torch.zeros(4096, 4096, device="cuda")  # 64 MiB


def from_host(pinned=False):
    return torch.zeros(4096, 4096, pin_memory=pinned)


# What the copy does, MiB that it takes on the GPU, its result included, MiB that it sends, and where to
CHANGED = {
    "converted on the host, which waits": (lambda x: x.to("cpu", torch.float64), from_gpu, 0, 64, "cpu"),
    "converted on the host before": (lambda x: x.to("cuda", torch.float16), from_host, 32, 32, "cuda"),
    "converted on the GPU": (lambda x: x.to("cuda", torch.float16, non_blocking=True), lambda: from_host(True), 96, 64, "cuda"),
    "half of each row, gathered there": (lambda x: x[:, ::2].cpu(), from_gpu, 32, 32, "cpu"),
    "into half of each row, spread there": (lambda x: x[:, ::2].copy_(torch.zeros(4096, 2048)), from_gpu, 32, 32, "cuda"),
    "turned round there": (lambda x: x.t().copy_(torch.zeros(4096, 4096)), from_gpu, 64, 64, "cuda"),
    "as it lies": (lambda x: x.t().cpu(), from_gpu, 0, 64, "cpu"),
    "channels last": (lambda x: x.view(16, 4, 512, 512).to("cuda", memory_format=LAST), from_host, 128, 64, "cuda"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_copies_that_change_type_or_order(run, name):
    """copy_kernel_cuda and copy_requires_temporaries in Copy.cu."""
    copy, make, taken, sent, where = CHANGED[name]
    with run(1, like="A100"):
        x, clock = make(), virtualgpu.machine().clock
        host = torch.empty(sent << 20, dtype=torch.uint8, device="cpu", pin_memory=x.is_pinned())
        gpu = torch.empty_like(host, device="cuda")
        plain = (lambda: host.copy_(gpu)) if where == "cpu" else (lambda: gpu.copy_(host))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for one in (plain, lambda: copy(x)):
            torch.cuda.synchronize()
            start = clock.host
            one()
            torch.cuda.synchronize()
            seconds.append(clock.host - start)
        assert torch.cuda.max_memory_allocated() - before == taken << 20
        assert seconds[1] == pytest.approx(seconds[0], abs=0.3e-3)  # a kernel on the GPU takes little beside
