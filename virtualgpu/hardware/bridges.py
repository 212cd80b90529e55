"""NVLink bridges, which are sold apart: they join two equal cards on PCI Express. `like="TITAN RTX NVLink"` asks for cards with theirs.

A bridged pair reaches each other's memory, also where the card alone does not. NCCL counts less of a link than its data sheet does
(timing/nccl.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from virtualgpu.hardware.cards import SPECS
from virtualgpu.hardware.datasheet import NVLINK_LATENCY, Link, Spec

BRIDGES = [key for key, spec in SPECS.items() if spec.bridge is not None]


def bridged(spec: Spec) -> Spec:
    """That card with its bridge; a card that has NVLink anyway as it is. Raises ValueError for one that takes none."""
    if spec.nvlink is not None:
        return spec
    bridge = spec.bridge
    if bridge is None:
        raise ValueError(f"{spec.name} takes no NVLink bridge; there are bridges for {', '.join(BRIDGES)}")
    return replace(spec, nvlink=bridge, peer=Link(bridge.links * bridge.bandwidth, NVLINK_LATENCY), peer_access=True)


def check(cards: Sequence[Spec]) -> None:
    """Raises ValueError for a machine that no bridge can join: NVLink on two cards, and on no third."""
    joined = any(card.nvlink is not None and card.nvlink.bridge for card in cards)
    if joined and (len(cards) > 2 or cards[0] != cards[-1]):
        raise ValueError("an NVLink bridge joins two equal cards: ask for 2 GPUs, or leave NVLink out of their name")
