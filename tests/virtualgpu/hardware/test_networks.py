"""Networks by name and rate, and NVLink bridges."""

import pytest

from virtualgpu.hardware.machine import NETWORKS, Network, find_network
from virtualgpu.hardware.specs import SPECS, Link, NVLink, find_spec, find_specs


@pytest.mark.parametrize("name", NETWORKS)
def test_each_is_found_by_its_name(name):
    network = NETWORKS[name]
    for written in (name, name.lower(), name.replace(" ", ""), name.replace("InfiniBand", "IB"), network):
        assert find_network(written) is network
    assert network.bandwidth * 8e-9 == float("".join(filter(str.isdigit, name)) or {"HDR": 200, "NDR": 400}[name[-3:]])
    assert network.shared == name.startswith("Ethernet")


@pytest.mark.parametrize(
    ("written", "bandwidth", "shared"),
    [
        ("100 Gb/s", 12.5e9, False),
        ("12.5 GB/s", 12.5e9, False),
        ("12.5GBps per GPU", 12.5e9, False),
        ("40 Gbit/s per node", 5e9, True),
        ("800Gbps", 100e9, False),
        *((wrong, None, None) for wrong in ("1e9", "0 Gb/s", "100 b/s", "9999999 TB/s", "NDR2", "", 100)),
    ],
)
def test_rates_of_ones_own(written, bandwidth, shared):
    if bandwidth is None:
        with pytest.raises(ValueError, match=r"there is no network called .*InfiniBand NDR.*\"100 Gb/s\""):
            find_network(written)
    else:
        network = find_network(written)
        assert network == Network(written, bandwidth, shared) and find_network(network.name) == network


@pytest.mark.parametrize(
    ("written", "key", "links", "gigabytes"),
    [
        ("TITAN RTX NVLink", "TITAN RTX", 2, 50),
        ("nvidia titan rtx + nvlink", "TITAN RTX", 2, 50),
        ("3090-NVLINK", "RTX 3090", 4, 56.25),
        ("RTX A6000 NV-Link", "RTX A6000", 4, 56.25),
        ("A100 PCIe 80GB NVLink", "A100-PCIE-80GB", 12, 300),
        ("H100 PCIe NVLink", "H100-PCIe", 12, 300),
    ],
)
def test_a_card_with_its_bridge(written, key, links, gigabytes):
    card, plain = find_spec(written), SPECS[key]
    assert card.nvlink == NVLink(links, gigabytes * 1e9 / links, switch=False, bridge=True) and card.peer_access
    assert card.peer == Link(gigabytes * 1e9, 2e-6) and plain.nvlink is None
    assert (card.name, card.memory, card.host, card.rates) == (plain.name, plain.memory, plain.host, plain.rates)


def test_bridges_join_two_equal_cards():
    assert find_spec("A100 NVLink") is SPECS["A100"]  # it has NVLink as it is
    assert len(find_specs(2, "TITAN RTX NVLink")) == 2
    for n, like in ((3, "TITAN RTX NVLink"), (2, "TITAN RTX NVLink,T4"), (2, "TITAN RTX,TITAN RTX NVLink")):
        with pytest.raises(ValueError, match="NVLink bridge joins two equal cards: ask for 2 GPUs"):
            find_specs(n, like)
    words = "Tesla T4 takes no NVLink bridge; there are bridges for TITAN RTX, RTX 2080 Ti, RTX 3090"
    with pytest.raises(ValueError, match=words):
        find_spec("T4 NVLink")


def test_a_bridge_in_a_cards_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'base = "TITAN RTX"\npeer_access = true\npeer = "50 GB/s"\n'
        'nvlink = {links = 2, bandwidth = "25 GB/s", switch = false, bridge = true}\n'
    )
    assert find_spec(file).nvlink == find_spec("TITAN RTX NVLink").nvlink
    file.write_text('base = "TITAN RTX"\nnvlink = {links = 2, bandwidth = "25 GB/s", switch = false, bridge = 1}\n')
    with pytest.raises(ValueError, match=r"nvlink.bridge = 1 must be true or false"):
        find_spec(file)
