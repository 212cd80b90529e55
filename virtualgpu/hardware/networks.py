"""What joins the nodes of a cluster: a table with sources, and figures of one's own.

Bytes/s are line rates in one direction, as NCCL takes them (src/graph/topo.cc: a card's Mbit/s / 8000 is its GB/s). InfiniBand and
RoCE stand here with a card for each GPU, as machines for training have them; Ethernet with one card for all GPUs of a node, as
ordinary servers and most instances of clouds do. A latency of their own none of them has in NCCL's model: net_ib and net_socket leave it
at 0, and every step over a network costs the same (timing/nccl.py). TCP's share of the line, and what it asks of the CPU, are in
neither: with sockets a simulated time is a lower bound.
"""

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """What a node has to reach the others. bandwidth: of one card, bytes/s in one direction. shared: one card serves all GPUs of a
    node; otherwise each GPU has its own.
    """

    name: str
    bandwidth: float
    shared: bool = False


def _gigabits(name: str, rate: float, shared: bool = False) -> Network:
    return Network(name, rate * 1e9 / 8, shared)


NETWORKS = {
    network.name: network
    for network in (
        # InfiniBand Trade Association's roadmap, 4 lanes: HDR 200 Gb/s, NDR 400 Gb/s. A card for each GPU: NVIDIA DGX A100 data
        # sheet (8 x ConnectX-6) and DGX H100 data sheet (8 x ConnectX-7). PyTorch's model has the same two figures.
        _gigabits("InfiniBand HDR", 200),
        _gigabits("InfiniBand NDR", 400),
        # RDMA over the rates of IEEE 802.3: 100 (802.3bj, 2014), 200 and 400 Gb/s (802.3bs, 2017). ConnectX-5, 6 and 7 data sheets.
        # Meta's H100s that PyTorch's model was calibrated on have RoCE 400 for each GPU (arXiv 2407.21783, 3.3.1).
        _gigabits("RoCE 100", 100),
        _gigabits("RoCE 200", 200),
        _gigabits("RoCE 400", 400),
        # TCP over IEEE 802.3ae (2002), 802.3by (2016) and 802.3bj (2014), one card for a node
        _gigabits("Ethernet 10", 10, shared=True),
        _gigabits("Ethernet 25", 25, shared=True),
        _gigabits("Ethernet 100", 100, shared=True),
    )
}
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def find(network: str | Network) -> Network:
    """The network of that name ("InfiniBand NDR", "NDR", "ethernet 10"), or of that rate ("100 Gb/s", "25 GB/s", and "100 Gb/s per
    node" where one card serves all GPUs of a node; per GPU otherwise). Raises ValueError, naming what there is.
    """
    if isinstance(network, Network):
        return network
    for name, known in NETWORKS.items():
        if isinstance(network, str) and _plain(network) == _plain(name):
            return known
    found = isinstance(network, str) and re.fullmatch(
        r"\s*(\d+\.?\d*|\.\d+)\s*([kmgtKMGT]?)(B|b|[bB]its?)(?:/s|ps)(?:\s+per\s+(GPU|gpu|node))?\s*", network
    )
    rate = float(found[1]) * _PREFIX[found[2].lower()] / (1 if found[3] == "B" else 8) if found else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(
            f"there is no network called {network!r} here; choose one of {', '.join(NETWORKS)}; or say its rate for each GPU, such as "
            '"100 Gb/s" or "25 GB/s", or for all GPUs of a node, "100 Gb/s per node"'
        )
    return Network(" ".join(network.split()), rate, found[4] == "node")


def _plain(name: str) -> str:
    return re.sub(r"infiniband|\bib\b|gb/s|gbps|[^a-z0-9]", "", name.lower())
