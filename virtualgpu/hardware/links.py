"""Between GPUs that do not reach each other's memory: what the way through the host's gives, as others measured it (data/links.toml).

The host matters more than the lanes: a card takes the median of what was measured with its own compute capability, and where nothing
was that of all with its PCI Express.

What a ring sends and receives at once is what copies both ways do, so half of their sum stands for the all-reduce where no table of it
is known (PCI Express 3.0 and 4.0); where both are (5.0), the all-reduce reaches 28 GB/s and the copies 21.5.
"""

import functools
from statistics import median

from virtualgpu.hardware import tables
from virtualgpu.hardware.datasheet import PCIE3, PCIE4, PCIE5, Link

GENERATIONS = {3: PCIE3, 4: PCIE4, 5: PCIE5}
LATENCY = 12e-6  # of such a copy: two RTX 4090, 11.4 to 13.1 us (p2pBandwidthLatencyTest)


def copies(capability: tuple[int, int], host: Link) -> Link:
    """Of a card with that way to the host, to another one like it."""
    rate = _measured("copy", capability, host) or 0.0
    return Link(min(rate * 1e9, _largest_share("copy") * host.bandwidth), LATENCY)


def ring(capability: tuple[int, int], host: Link) -> float:
    """What NCCL's ring sends from each GPU to the next, in bytes/s."""
    rate = _measured("all_reduce", capability, host) or (_measured("copy both ways", capability, host) or 0.0) / 2
    return min(rate * 1e9, _largest_share("all_reduce") * host.bandwidth)


def _measured(what: str, capability: tuple[int, int], host: Link) -> float | None:
    """GB/s; None where nobody measured it over that PCI Express."""
    generation = min(GENERATIONS, key=lambda number: abs(GENERATIONS[number].bandwidth - host.bandwidth))
    rows = [row for row in tables.rows("links")["measured"] if row["what"] == what and row["pcie"] == generation]
    own = [row for row in rows if row["capability"] == "{}.{}".format(*capability)]
    return median(row["rate"] for row in own or rows) if rows else None


@functools.cache
def _largest_share(what: str) -> float:
    """The largest share of PCI Express that anybody reached: what a narrower slot is taken to give at most."""
    rows = tables.rows("links")["measured"]
    return max(row["rate"] * 1e9 / GENERATIONS[row["pcie"]].bandwidth for row in rows if row["what"] == what)
