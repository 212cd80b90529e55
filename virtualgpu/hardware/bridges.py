"""NVLink bridges, which are sold apart: they join two equal cards on PCI Express. `like="TITAN RTX NVLink"` asks for cards with theirs.

A bridged pair reaches each other's memory, also where the card alone does not. NCCL counts less of a link than its data sheet does
(timing/nccl.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from virtualgpu.hardware.cards import SPECS
from virtualgpu.hardware.datasheet import NVLINK_LATENCY, Link, NVLink, Spec


def _bridge(links: int, gigabytes: float) -> NVLink:
    """`links` of so many GB/s each way."""
    return NVLink(links, gigabytes * 1e9, switch=False, bridge=True)


BRIDGES = {  # by the card's key in the table
    # TITAN RTX: 100 GB/s both ways (NVIDIA's page of its NVLink bridge), two links of 25 GB/s as TU102 has them (Turing white paper)
    "TITAN RTX": _bridge(2, 25),
    # GA102 white paper (2021): four links of 14.0625 GB/s each way, 112.5 GB/s both ways
    "RTX 3090": _bridge(4, 14.0625),
    "RTX A6000": _bridge(4, 14.0625),
    # A100 PCIe product brief (2020) and H100 PCIe product brief (2022): three bridges, 600 GB/s both ways; links of 25 GB/s each way
    "A100-PCIE-40GB": _bridge(12, 25),
    "A100-PCIE-80GB": _bridge(12, 25),
    "H100-PCIe": _bridge(12, 25),
}


def bridged(spec: Spec) -> Spec:
    """That card with its bridge; a card that has NVLink anyway as it is. Raises ValueError for one that takes none."""
    if spec.nvlink is not None:
        return spec
    nvlink = next((bridge for key, bridge in BRIDGES.items() if SPECS[key].name == spec.name), None)
    if nvlink is None:
        raise ValueError(f"{spec.name} takes no NVLink bridge; there are bridges for {', '.join(BRIDGES)}")
    return replace(spec, nvlink=nvlink, peer=Link(nvlink.links * nvlink.bandwidth, NVLINK_LATENCY), peer_access=True)


def check(cards: Sequence[Spec]) -> None:
    """Raises ValueError for a machine that no bridge can join: NVLink on two cards, and on no third."""
    joined = any(card.nvlink is not None and card.nvlink.bridge for card in cards)
    if joined and (len(cards) > 2 or cards[0] != cards[-1]):
        raise ValueError("an NVLink bridge joins two equal cards: ask for 2 GPUs, or leave NVLink out of their name")
