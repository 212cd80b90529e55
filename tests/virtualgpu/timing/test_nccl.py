"""The cost of collectives, against PyTorch's own model of NCCL."""

from dataclasses import replace

import pytest

import virtualgpu
from virtualgpu.hardware import units
from virtualgpu.hardware.network import Fabric, find_network, slowest
from virtualgpu.hardware.specs import Link, find_spec
from virtualgpu.timing import nccl

SIZES = (1, 100, 5000, 65536, 10**6, 25 << 20, 10**9)
RANKS = (2, 4, 8, 16, 32, 64, 512)


@pytest.mark.parametrize(
    ("card", "network"),
    [
        *[(card, None) for card in ("V100", "A100", "H100", "B200", "A100-PCIE-40GB")],
        *[("H100", "InfiniBand NDR"), ("A100", "RoCE 100"), ("A100-PCIE-40GB", "40 Gb/s")],
    ],
)
def test_costs_are_those_of_pytorchs_model(card, network, monkeypatch):
    """Also with a network of one's own, which theirs has as inter_node_bw. Theirs lets cards of a node reach each other over PCI Express, and has an
    all_to_all pass a ring twice: here it costs what their all_gather does.
    """
    theirs = pytest.importorskip("torch._inductor.comm_analysis")
    if not hasattr(theirs, "_nccl_algo_time"):
        pytest.skip("this version of PyTorch has another model")
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    spec = virtualgpu.SPECS[card]
    virtualgpu.gpus(8, like=spec)
    monkeypatch.setattr(theirs, "_has_nvlink", lambda: spec.nvlink is not None)
    theirs.get_gpu_type.cache_clear()
    joined = network and find_network(network)
    if joined:
        monkeypatch.setattr(theirs, "get_inter_node_bw", lambda: joined.bandwidth / 1e9)
    kinds = theirs.NCCL_COLL
    try:
        fabric = Fabric.of(spec, joined, "SYS")
        for kind, their in (
            ("all_reduce", kinds.ALL_REDUCE),
            ("all_gather", kinds.ALL_GATHER),
            ("reduce_scatter", kinds.REDUCE_SCATTER),
            ("all_to_all", kinds.ALL_GATHER),
        ):
            for nbytes in SIZES:
                for ranks in RANKS:
                    ours = nccl.seconds(kind, nbytes, ranks, fabric, -(-ranks // 8))
                    milliseconds = theirs.estimate_nccl_collective_runtime_impl(nbytes, ranks, their)
                    assert ours == pytest.approx(milliseconds / 1e3, rel=1e-9)
    finally:
        virtualgpu.reset()
        theirs.get_gpu_type.cache_clear()


REACHING = replace(
    find_spec("T4"), peer=find_spec("T4").host, peer_access=True
)  # as on a machine that is no virtual one


def test_other_collectives_and_cards():
    h100, t4, titan = (Fabric.of(card, None, "SYS") for card in (find_spec("H100"), REACHING, find_spec("TITAN RTX")))
    assert (h100.nvlink, t4.nvlink) == (True, False) and t4.inside == pytest.approx(12)  # NCCL's PCI Express 3.0
    large = 10**9
    for kind in ("broadcast", "reduce", "gather", "scatter", "p2p", "all_reduce"):
        assert nccl.seconds(kind, large, 1, h100) == 0
        assert nccl.seconds(kind, large, 4, t4) > 5 * nccl.seconds(kind, large, 4, h100)
    assert nccl.seconds("barrier", 0, 4, h100) == nccl.seconds("all_reduce", 1, 4, h100)
    assert nccl.seconds("p2p", large, 2, t4) == pytest.approx(large / 12e9, rel=0.01)
    assert nccl.seconds("all_gather", large, 4, t4) == pytest.approx(0.75 * large / 12e9, rel=0.01)
    assert slowest([h100, t4]) == t4 and titan.inside < 0.5 * t4.inside  # which has no peer access


def test_within_a_node():
    """NCCL counts less for a bridge than its data sheet (graph/topo.h), and nothing of NVLink where NCCL_P2P_DISABLE=1 forbids it.
    Through the host's memory it is what was measured (hardware.links), of that capability where there is more than one figure.
    """
    of = Fabric.of
    bridged, titan, geforce = (
        find_spec("TITAN RTX NVLink"),
        find_spec("TITAN RTX"),
        find_spec("RTX 3090 NVLink"),
    )
    assert (of(bridged).inside, of(titan).inside, of(geforce).inside) == (40, pytest.approx(3.23), 48)
    assert of(bridged, None, "LOC") == of(titan) == of(titan, None, "SYS")
    assert of(REACHING, None, "SYS").inside == pytest.approx(12)  # by default NCCL does not pass the host's bridge
    assert of(REACHING) == of(REACHING, None, "LOC") == of(find_spec("T4")) == of(titan)  # of one PCI Express
    h100 = of(find_spec("H100"), None, "LOC")
    assert of(find_spec("H100")).nvlink and not h100.nvlink and h100.inside == pytest.approx(26.56)
    staged = [of(find_spec(card)).inside for card in ("RTX 5090", "RTX 4090", "RTX 3090")]
    assert staged == pytest.approx([26.56, 3.52, 3.04])
    narrow = replace(find_spec("T4"), host=Link(2e9, 1e-5), peer_access=False)
    assert of(narrow).inside == pytest.approx(2 * 18 / 31.5)  # no more of it than the most that was measured


def test_through_the_hosts_memory():
    """Also copies of cards without peer access (cudaMemcpyPeer)."""
    seconds = [
        find_spec(card).peer.seconds(10**9) for card in ("TITAN RTX", "RTX 3090", "RTX 4090", "RTX 5090", "RTX A6000")
    ]
    assert [round(1 / duration, 1) for duration in seconds] == [4.4, 6.1, 22.1, 38.5, 31.5]
    for row in units.rows("links")["measured"]:
        assert row["source"] and row["licence"] and row["rate"] > 0


@pytest.mark.parametrize(
    ("kind", "sent", "measured"),
    [("all_reduce", 1.0, 4.0), ("all_to_all", 0.5, 4.61), ("broadcast", 1.0, 11.09), ("reduce", 1.0, 11.14)],
)
def test_a_pair_through_the_host_as_measured(kind, sent, measured):
    """GB/s on the bus of two RTX 2080 Ti behind one switch, 1 GiB (links.toml), whose host is faster than the median. With a third card a broadcast
    has the ring's rate, for the one between sends and receives."""
    fabric = Fabric.of(find_spec("RTX 2080 Ti"))
    assert sent * 10 / nccl.seconds(kind, 10**10, 2, fabric) == pytest.approx(measured, rel=0.31)
    assert nccl.seconds("broadcast", 10**10, 3, fabric) == pytest.approx(10 / fabric.inside, rel=0.01)


def test_a_small_message_through_the_host_as_measured():
    """us of an all_reduce of 1 KiB: 2 and 8 RTX 2080 Ti, 2, 4 and 8 RTX 4090 (links.toml)."""
    for like, measured in (("RTX 2080 Ti", {2: 12.1, 8: 37.5}), ("RTX 4090", {2: 12.2, 4: 21.0, 8: 44.0})):
        fabric = Fabric.of(find_spec(like))
        told = [1e6 * nccl.seconds("all_reduce", 1024, ranks, fabric) for ranks in measured]
        assert told == pytest.approx([*measured.values()], rel=0.15)


def test_a_pair_of_v100s_has_two_links_of_six():
    """And half of the cube of a DGX-1 four; measured were 130 to 135 GB/s over all eight, and 122 where a switch joins them."""

    def bus(like: str, members: int) -> float:
        fabric = Fabric.of(find_spec(like)).shared_by(members, 8)
        return 2 * (members - 1) / members * 10 / nccl.seconds("all_reduce", 10**10, members, fabric)

    assert [round(bus("V100", members)) for members in (2, 4, 8)] == [40, 80, 120]
    assert [round(bus("A100", members)) for members in (2, 4, 8)] == [240, 240, 240]
    pair = Fabric.of(find_spec("V100")).shared_by(8, 8)
    assert nccl.seconds("p2p", 10**10, 2, pair) == pytest.approx(10 / 40, rel=0.01)


def test_between_nodes():
    def gather(network: str | None, nodes: int, like: str = "A100", members: int = 8) -> float:
        card = like if like is REACHING else find_spec(like)
        fabric = Fabric.of(card, network and find_network(network), "SYS").shared_by(members, 8)
        return nccl.seconds("all_gather", 10**9, nodes * members, fabric, nodes)

    assert gather("HDR", 4) == gather(None, 4) == gather("200 Gb/s", 4) == gather("25 GB/s", 4)  # of that generation
    assert gather("NDR", 4, "H100") == gather(None, 4, "H100")
    assert gather("NDR", 4, "T4") == pytest.approx(gather("15.75 GB/s", 4, "T4"))  # PCI Express 3.0 carries no more
    once = 31 / 32 * 10**9  # what a ring sends through each card
    assert gather("Ethernet 100", 4) == pytest.approx(once / 12.5e9, rel=0.01)
    assert gather("Ethernet 10", 4) == pytest.approx(once / 1.25e9, rel=0.01)
    assert gather("Ethernet 10", 4, members=1) == pytest.approx(
        0.75 * 10**9 * 8 / 1.25e9, rel=0.01
    )  # eight groups at once
    assert gather("Ethernet 100", 4, REACHING) == pytest.approx(once / 12e9, rel=0.01)  # within the node it is slower
    mixed = slowest(
        [
            Fabric.of(find_spec("H100"), find_network("RoCE 100")),
            Fabric.of(find_spec("A100-PCIE-40GB"), None, "SYS"),
        ]
    )
    assert (mixed.inside, mixed.between) == (pytest.approx(24), 12.5)


def test_two_nodes_of_cards_without_peer_access_are_no_faster_than_one():
    t4 = Fabric.of(find_spec("T4"))
    one, two = (nccl.seconds("all_reduce", 10**9, 8 * nodes, t4.shared_by(8, 8), nodes) for nodes in (1, 2))
    assert two > one
