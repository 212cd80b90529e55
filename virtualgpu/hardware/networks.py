"""What joins the nodes of a cluster: data/networks.toml, with sources, and figures of one's own.

A latency of their own none of them has in NCCL's model: net_ib and net_socket leave it at 0, and every step over a network costs the
same (timing/nccl.py). TCP's share of the line, and what it asks of the CPU, are in neither: with sockets a simulated time is a lower
bound.
"""

import re
from dataclasses import dataclass
from typing import Any

from virtualgpu.hardware import tables
from virtualgpu.hardware.units import PLAUSIBLE


@dataclass(frozen=True)
class Network:
    """What a node has to reach the others. bandwidth: of one card, bytes/s in one direction. shared: one card serves all GPUs of a
    node; otherwise each GPU has its own.
    """

    name: str
    bandwidth: float
    shared: bool = False


_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgtKMGT]?)(B|b|[bB]its?)(?:/s|ps)(?:\s+per\s+(GPU|gpu|node))?\s*")


def _of_rate(text: str) -> Network | None:
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * _PREFIX[match[2].lower()] / (1 if match[3] == "B" else 8) if match else 0.0
    least, most = PLAUSIBLE["B/s"]
    return Network(" ".join(text.split()), rate, match[4] == "node") if match and least <= rate <= most else None


def _network(name: str, values: dict[str, Any]) -> Network:
    tables.check_keys(values, ["rate", "shared"])
    network = _of_rate(str(values.get("rate")))
    if network is None:
        raise ValueError('must say its rate, such as rate = "100 Gb/s"')
    return Network(name, network.bandwidth, values.get("shared", False))


NETWORKS = tables.read("networks", _network)


def find(network: str | Network) -> Network:
    """The network of that name ("InfiniBand NDR", "NDR", "ethernet 10"), or of that rate ("100 Gb/s", "25 GB/s", and "100 Gb/s per
    node" where one card serves all GPUs of a node; per GPU otherwise). Raises ValueError, naming what there is.
    """
    if isinstance(network, Network):
        return network
    result = None
    if isinstance(network, str):
        by_name = {_plain(name): known for name, known in NETWORKS.items()}
        result = by_name.get(_plain(network)) or _of_rate(network)
    if result is None:
        raise ValueError(
            f"there is no network called {network!r} here; choose one of {', '.join(NETWORKS)}; or say its rate for each GPU, such as "
            '"100 Gb/s" or "25 GB/s", or for all GPUs of a node, "100 Gb/s per node"'
        )
    return result


def _plain(name: str) -> str:
    return re.sub(r"infiniband|\bib\b|gb/s|gbps|[^a-z0-9]", "", name.lower())
