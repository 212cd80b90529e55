"""What the ways to the host give, and those between GPUs, as others measured them (data/links.toml).

Between two GPUs that do not reach each other's memory the host matters more than the lanes and the card: an all-reduce of two or four RTX 4090
was measured at 0.9 to 18 GB/s. Copies take the median of what was measured with the card's own compute capability; NCCL's ring takes it
where there are two figures or more, for one is no more than a host; else the median of all with that PCI Express.

A copy says little of a ring: the driver copies with an engine, and NCCL's kernels load from the host's memory (3 to 6 times as slow on one machine).
"""

import functools
from statistics import median

from virtualgpu.hardware import tables
from virtualgpu.hardware.datasheet import PCIE3, PCIE4, PCIE5, Link, Spec

GENERATIONS = {3: PCIE3, 4: PCIE4, 5: PCIE5}
LATENCY = 12e-6  # of such a copy: two RTX 4090, 11.4 to 13.1 us (p2pBandwidthLatencyTest)


@functools.cache
def to_host(link: Link, way: str, pinned: bool) -> Link:
    """What copies from the host's memory ("in") or to it ("out") reach of that link: the median of its PCI Express generation, whatever the
    card. Faster links than these are taken at their word.

    Memory that a copy to the host is the first to touch takes longer, up to eight times (1.1 and 1.4 GB/s were measured): not modelled.
    """
    if link.bandwidth > 1.5 * PCIE5.bandwidth:
        return link
    generation = _generation(link)
    rows = [row for row in tables.rows("links")["host"] if row["pcie"] == generation]
    own = [row for row in rows if row["memory"] == ("pinned" if pinned else "pageable")]
    rate = median(row["rate"] for row in [row for row in own if row["way"] == way] or own) * 1e9
    lanes = min(link.bandwidth / GENERATIONS[generation].bandwidth, 1.0)
    return Link(rate * lanes if pinned else min(rate, to_host(link, way, True).bandwidth), link.latency)


def between(one: Spec, other: Spec, promised: bool = False) -> Link:
    """What copies from one GPU to another reach: over NVLink, if they are of one kind that has it; over PCI Express, where both cards have peer
    access; else through the host's memory. promised: as data sheets say it, not as others measured it.
    """
    if not (one.peer_access and other.peer_access):  # `peer` is measured as it is
        return min((card.host if card.peer_access else card.peer for card in (one, other)), key=_bandwidth)
    alike = (one.peer, one.nvlink) == (other.peer, other.nvlink)
    link = one.peer if alike else min(one.host, other.host, key=_bandwidth)
    return link if promised else to_peer(link, one.capability, alike and one.nvlink is not None)


def _bandwidth(link: Link) -> float:
    return link.bandwidth


@functools.cache
def to_peer(link: Link, capability: tuple[int, int], nvlink: bool) -> Link:
    """What copies reach of a link between GPUs that reach each other's memory: the share that others measured of NVLink in that generation,
    or in the last one before it that anybody measured; of PCI Express in any.
    """
    rows = [row for row in tables.rows("links")["peer"] if row["nvlink"] == nvlink]
    if nvlink:
        generations = sorted({tuple(map(int, row["capability"].split("."))) for row in rows})
        generation = max((one for one in generations if one <= capability), default=generations[0])
        rows = [row for row in rows if row["capability"] == "{}.{}".format(*generation)]
    return Link(link.bandwidth * median(row["rate"] / row["promised"] for row in rows), link.latency)


def copies(capability: tuple[int, int], host: Link) -> Link:
    """Of a card with that way to the host, to another one like it."""
    rate = _measured("copy", capability, host) or 0.0
    return Link(min(rate * 1e9, _largest_share("copy") * host.bandwidth), LATENCY)


def ring(capability: tuple[int, int], host: Link) -> float:
    """What NCCL's ring sends from each GPU to the next, in bytes/s."""
    rate = _measured("all_reduce", capability, host, least=2) or 0.0
    return min(rate * 1e9, _largest_share("all_reduce") * host.bandwidth)


def _measured(what: str, capability: tuple[int, int], host: Link, least: int = 1) -> float | None:
    """GB/s; None where nobody measured it over that PCI Express. least: figures for a median of the card's own capability."""
    generation = _generation(host)
    rows = [row for row in tables.rows("links")["measured"] if row["what"] == what and row["pcie"] == generation]
    own = [row for row in rows if row["capability"] == "{}.{}".format(*capability)]
    enough = len(own) >= least
    return median(row["rate"] for row in (own if enough else rows)) if rows else None


def _generation(host: Link) -> int:
    return min(GENERATIONS, key=lambda number: abs(GENERATIONS[number].bandwidth - host.bandwidth))


@functools.cache
def _largest_share(what: str) -> float:
    """The largest share of PCI Express that anybody reached: what a narrower slot is taken to give at most."""
    rows = tables.rows("links")["measured"]
    return max(row["rate"] * 1e9 / GENERATIONS[row["pcie"]].bandwidth for row in rows if row["what"] == what)
