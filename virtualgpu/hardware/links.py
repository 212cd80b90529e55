"""Between GPUs that do not reach each other's memory: what the way through the host's gives, as others measured it.

`data/links.csv` has copies (cudaMemcpyPeer, staged by the driver; one way, and the sum of both ways at once) and NCCL's all-reduce over
its shared memory ("bus bandwidth" of nccl-tests), in GB/s by generation of PCI Express. The host matters more than the lanes: a card
takes the median of its own compute capability's rows, and where there are none that of all rows of its PCI Express. No row comes from
a program.

What a ring sends and receives at once is what copies both ways do, so half of their sum stands for the all-reduce where no table of it
is known (PCI Express 3.0 and 4.0); where both are (5.0), the all-reduce reaches 28 GB/s and the copies 21.5.
"""

import csv
import functools
from pathlib import Path
from statistics import median

from virtualgpu.hardware.datasheet import PCIE3, PCIE4, PCIE5, Link

TABLE = Path(__file__).parent / "data" / "links.csv"
GENERATIONS = {3: PCIE3, 4: PCIE4, 5: PCIE5}
LATENCY = 12e-6  # of such a copy: two RTX 4090, 11.4 to 13.1 us (p2pBandwidthLatencyTest)


def copies(capability: tuple[int, int], host: Link) -> Link:
    """Of a card with that way to the host, to another one like it."""
    return Link(min(_measured("copy", capability, host) * 1e9, _most("copy") * host.bandwidth), LATENCY)


def ring(capability: tuple[int, int], host: Link) -> float:
    """What NCCL's ring sends from each GPU to the next, in bytes/s."""
    reached = _measured("all_reduce", capability, host) or _measured("copy both ways", capability, host) / 2
    return min(reached * 1e9, _most("all_reduce") * host.bandwidth)


@functools.cache
def _rows() -> list[dict[str, str]]:
    with open(TABLE, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _measured(what: str, capability: tuple[int, int], host: Link) -> float | None:
    generation = min(GENERATIONS, key=lambda number: abs(GENERATIONS[number].bandwidth - host.bandwidth))
    rows = [row for row in _rows() if row["what"] == what and int(row["pcie"]) == generation]
    own = [row for row in rows if row["capability"] == "{}.{}".format(*capability)]
    return median(float(row["GBps"]) for row in own or rows) if rows else None


@functools.cache
def _most(what: str) -> float:
    """The largest share of PCI Express that anybody reached: what a narrower slot is taken to give at most."""
    return max(
        float(row["GBps"]) * 1e9 / GENERATIONS[int(row["pcie"])].bandwidth for row in _rows() if row["what"] == what
    )
