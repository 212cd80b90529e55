"""The figures of the table, against each other and against what is known apart from it."""

import math

import pytest
import torch

import virtualgpu
from tests.accuracy.kernels import multiplied
from virtualgpu.hardware import datasheet, specs, units
from virtualgpu.hardware.specs import SPECS, TF32, Link, Spec, basis
from virtualgpu.timing.kernels import Kernels
from virtualgpu.timing.memory_bound import ORDINARY

GEFORCE = {"RTX 2080 Ti", "RTX 3090", "RTX 4090", "RTX 5090"}
SOLD_AS = (11, 16, 24, 32, 40, 48, 80, 96, 141, 180)  # GB on the box
every_card = pytest.mark.parametrize("key", SPECS)


@every_card
def test_figures_agree_with_each_other(key):
    """H200: the data sheet says 4.8 TB/s, its clock gives 4.92. H100-96GB: bus and clock are not known. P100 PCIe: CUDA reports 1,329 MHz, the
    data sheet's rate is at 1,303. Tensor cores: multiply-adds of one multiprocessor's in a cycle, dense, accumulating in float32 (white
    papers); on Hopper and Blackwell B200 they are clocked some 8 % lower than the highest clock."""
    spec = SPECS[key]
    capability, rates, memory = spec.capability, spec.rates, spec.memory / 2**30
    assert 0.9 * min(size for size in SOLD_AS if size >= memory) <= memory, "the driver leaves most of it"
    if key == "H100-96GB":
        assert spec.bus is None and spec.memory_clock is None and spec.memory_clock_rate == spec.memory_bus_width == 0
    else:
        of_bus, off = 2 * spec.memory_clock * spec.bus / 8, 0.025 if key == "H200" else 0.02
        assert of_bus == pytest.approx(spec.bandwidth, rel=off)
    cores = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}.get(capability, 128)
    assert cores == spec.limits.cores
    assert 2 * spec.processors * cores * spec.clock == pytest.approx(rates["float32"], rel=0.025)
    fraction = {(7, 5): 32, (8, 6): 64, (8, 9): 64, (12, 0): 64}.get(capability, 2)
    assert rates["float32"] / rates["float64"] == pytest.approx(fraction, rel=0.025)
    each = {(7, 0): 512, (7, 5): 512, (8, 0): 1024, (8, 6): 512, (8, 9): 512, (9, 0): 2048, (10, 0): 4096, (12, 0): 512}
    expected = 256 if key in GEFORCE or key == "A10G" else each.get(capability, 64)  # P100 has none: cores for float32
    assert expected * 0.9 <= rates["float16"] / (2 * spec.processors * spec.clock) <= expected * 1.01


@every_card
def test_narrower_types_are_twice_as_fast(key):
    rates, capability = SPECS[key].rates, SPECS[key].capability
    half = rates["float16"]
    assert rates["float64"] < rates["float32"] <= half and all(math.isfinite(rate) for rate in rates.values())
    assert (TF32 in rates) == ("bfloat16" in rates) == (capability >= (8, 0))
    assert ("float8_e4m3fn" in rates) == ("float8_e5m2" in rates) == (capability >= (8, 9))
    if capability >= (8, 0):
        assert rates["bfloat16"] == half and half / rates[TF32] == pytest.approx(2, rel=0.01)
    if capability >= (8, 9):
        assert rates["float8_e4m3fn"] == rates["float8_e5m2"] == pytest.approx(2 * half, rel=0.005)


@every_card
def test_links_are_the_bus_or_nvlinks(key):
    spec = SPECS[key]
    if spec.nvlink is None:
        assert spec.peer == (spec.host if spec.peer_access else datasheet.copies(spec.capability, spec.host))
        assert spec.peer.bandwidth <= spec.host.bandwidth
        assert spec.peer_access == (key not in GEFORCE and key not in ("TITAN RTX", "T4"))
    else:
        assert spec.peer_access and spec.peer.latency < spec.host.latency < spec.host.seconds(1)
        share = spec.peer.bandwidth / (spec.nvlink.links * spec.nvlink.bandwidth)
        assert share == 1 if spec.nvlink.switch else share == {"P100-SXM2": 1 / 4}.get(key, 1 / 3)


@pytest.mark.parametrize(
    "key, shared, optin, threads",  # as PyTorch prints them of such cards
    [
        ("P100", 65536, 49152, 2048),
        ("T4", 65536, 65536, 1024),
        ("A100", 167936, 166912, 2048),
        ("RTX 4090", 102400, 101376, 1536),
    ],
)
def test_limits_follow_from_the_capability(key, shared, optin, threads):
    spec = SPECS[key]
    assert (spec.shared_memory_per_multiprocessor, spec.shared_memory_per_block_optin) == (shared, optin)
    assert (spec.max_threads_per_multi_processor, spec.shared_memory_per_block, spec.warp_size) == (threads, 49152, 32)


def test_properties_are_in_pytorchs_units():
    spec = SPECS["RTX 4090"]
    assert (spec.clock_rate, spec.memory_clock_rate) == (2_520_000, 10_501_000)  # kHz
    assert (spec.memory_bus_width, spec.L2_cache_size, spec.power) == (384, 75497472, 450)
    assert (spec.major, spec.minor, spec.architecture) == (8, 9, "Ada")
    assert (spec.total_memory, spec.multi_processor_count) == (24081 << 20, 128)


def test_a_spec_of_ones_own_needs_few_figures():
    link = Link(10e9, 1e-5)
    spec = Spec("Mine", 2**30, (8, 6), 10, {torch.float32: 2.56e12}, 100e9, link, link)
    assert spec.clock_rate == 1_000_000 and spec.L2_cache_size == 0
    assert Kernels(spec, peak=True).plain(2.56e12, 0, "float16") == pytest.approx(1 + 2e-6)
    assert Spec(**vars(spec)) == spec


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"capability": (3, 5)}, r"compute capability \(3, 5\) is not known here"),
        ({"capability": "8.6"}, "give a tuple, the nearest of 6.0"),
        ({"rates": {torch.float16: 1e12}}, r"with torch\.float32 at least"),
        ({"rates": {torch.float32: "fast"}}, "the rate of float32 is 'fast'"),
        ({"bandwidth": 0}, "bandwidth is 0, and must be a number above 0"),
        ({"kernel": math.inf}, "kernel is inf, and must be a number above 0"),
        ({"peer": 1e9}, r"a Link\(bandwidth, latency\) each"),
    ],
)
def test_a_spec_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        Spec(**{**vars(SPECS["T4"]), **wrong})


def test_the_table_names_every_card():
    lines = specs.table().splitlines()
    for line, (key, spec) in zip(lines[1:], SPECS.items(), strict=False):
        assert line.startswith(key + " ") and line.endswith(" " + spec.name)
    assert lines[0].split()[:4] == ["like", "GiB", "capability", "SMs"]
    a100 = next(line for line in lines if line.startswith("A100 ")).split()
    assert a100[1:11] == ["39.4", "8.0", "108", "19.5", "156", "312", "-", "1555", "300", "32"]


def test_every_card_stands_on_one_that_was_measured():
    assert {basis(spec) for spec in SPECS.values()} <= {key for key in SPECS}
    assert basis(SPECS["T4"]) == "T4" and basis(SPECS["A100-PCIE-40GB"]) == "A100"
    own = virtualgpu.Spec("mine", 1 << 34, (8, 9), 50, {torch.float32: 2e13}, 5e11, SPECS["L4"].peer, SPECS["L4"].host)
    assert basis(own) == "A100"


def test_every_row_says_its_source():
    cards = units.rows("achieved")
    rows = [(kind, row) for card in cards.values() for kind, row in card.items() if kind != "generation"]
    figures = [one for kind, row in rows for one in (row.values() if kind == "product" else [row])]
    assert cards.keys() <= SPECS.keys() and len(figures) > 60
    assert all(row["source"] and row["licence"] and row["date"] and 0.1 < row["share"] < 1.3 for row in figures)


@every_card
def test_the_data_sheet_is_a_lower_bound_but_for_clocks_that_are_held(key):
    kernels, peak = Kernels(SPECS[key]), Kernels(SPECS[key], peak=True)
    for kind in (("float32", 4), ("float16", 2)):
        assert multiplied(kernels, 1, *[8192] * 3, *kind) > 0.85 * multiplied(peak, 1, *[8192] * 3, *kind)
    assert kernels.moving(1 << 30, ORDINARY) > peak.moving(1 << 30, ORDINARY)
