"""Copies between a GPU and its host, pinned and not, and between GPUs: what others measured, not what a link promises."""

import pytest
import torch

import virtualgpu
from virtualgpu.hardware import links
from virtualgpu.hardware.datasheet import PCIE3, PCIE4, PCIE5, Link

NBYTES = 1 << 28


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
    "card, clock, expected",
    [
        ("V100", None, 47.9),
        ("A100", None, 274),
        ("H200", None, 376),
        ("B200", None, 752),  # as of the H100's NVLink
        ("RTX A6000", None, 25.2),
        ("P100", None, 12.6),
        ("T4", None, 4.4),  # through the host's memory
        ("TITAN RTX NVLink", None, 47.9),
        ("A100", "datasheet", 300),
    ],
)
def test_copies_between_gpus_reach_what_others_measured(run, card, clock, expected):
    with run(2, like=card, clock=clock):
        here = torch.ones(NBYTES, dtype=torch.uint8, device="cuda:0")
        assert rate(lambda: here.to("cuda:1")) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_slot_with_fewer_lanes_and_one_that_nobody_measured(way):
    half = Link(PCIE4.bandwidth / 2, 10e-6)
    assert links.to_host(half, way, True).bandwidth < links.to_host(PCIE4, way, True).bandwidth
    for link in (PCIE3, half, PCIE4, PCIE5, Link(4e9, 10e-6)):
        pageable, pinned = (links.to_host(link, way, memory) for memory in (False, True))
        assert pageable.bandwidth <= pinned.bandwidth < link.bandwidth and pinned.latency == link.latency
    chip_to_chip = Link(450e9, 2e-6)
    assert links.to_host(chip_to_chip, way, False) == chip_to_chip
