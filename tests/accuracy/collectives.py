"""Collectives that others timed with nccl-tests, beside what the clock says: `nccl_network.csv`, of several nodes, and `nccl_pcie.csv`, of one without NVLink.

    python -m tests.accuracy.collectives     simulated over measured, by network and size; with --all, every row

Several nodes: a source's in-place times, each second size from 1 KiB on. nics_per_node and nic_gbits: the network cards that all of a node's
GPUs have together, and what one carries. algorithm: forced, empty where NCCL chose. EFA, Slingshot and Google's GPUDirect over TCP have latencies
and losses of their own, of which NCCL's model knows nothing: there a simulated time is a lower bound. One node: the clock has the median of the ways
through a host, these hosts have their own.
"""

import csv
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.accuracy.kernels import within
from virtualgpu.hardware.machine import Fabric, Network
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import nccl

HERE = Path(__file__).parent
# cards that go by another name, and one that is near: of a GH200's GPU the cards, the NVLinks and the memory are an H100's
LIKE = {"GH200": "H100-96GB", "A100 PCIe 40GB": "A100-PCIE-40GB"}
KINDS = {"alltoall": "all_to_all"}
SIZES = {
    "below 64 KiB": 64 << 10,
    "to 1 MiB": 1 << 20,
    "to 16 MiB": 16 << 20,
    "to 256 MiB": 256 << 20,
    "larger": math.inf,
}
EXPECTED = "InfiniBand", "RoCE"  # which NCCL's model is of


class Timed(NamedTuple):
    """One measured collective, and its simulated time, both in microseconds."""

    group: str
    kind: str
    nodes: int
    gpus: int
    card: str
    nbytes: int
    measured: float
    simulated: float
    source: str

    @property
    def log(self) -> float:
        """Of simulated over measured."""
        return math.log(self.simulated / self.measured)

    @property
    def size(self) -> str:
        return next(name for name, most in SIZES.items() if self.nbytes < most)

    @property
    def bus(self) -> tuple[float, float]:
        """GB/s on the bus as nccl-tests counts, measured and simulated."""
        ranks = self.nodes * self.gpus
        sent = (2 if self.kind == "all_reduce" else 1) * (ranks - 1) / ranks * self.nbytes / 1000
        return sent / self.measured, sent / self.simulated


def fabric(row: dict[str, str], card: str) -> Fabric:
    """Of a row on several nodes. A card for each GPU is a card of its own; fewer are so much less for each; one is shared."""
    gpus, cards, rate = int(row["gpus_per_node"]), int(row["nics_per_node"]), float(row["nic_gbits"]) * 1e9 / 8
    shared = cards == 1 < gpus
    network = Network(row["network"], rate if shared else rate * cards / gpus, shared)
    return Fabric.of(SPECS[card], network).shared_by(gpus, gpus)


def rows(name: str) -> Iterator[dict[str, str]]:
    with open(HERE / f"{name}.csv", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def timed() -> list[Timed]:
    """All whose card the clock knows."""
    found = []
    for row in [*rows("nccl_network"), *rows("nccl_pcie")]:
        card = LIKE.get(row["card"], row["card"])
        nodes, gpus = int(row.get("nodes", 1)), int(row.get("gpus_per_node") or row["gpus"])
        if "nodes" in row:
            expected = row["network"] in EXPECTED
            group = "several nodes, InfiniBand and RoCE" if expected else "several nodes, other networks"
            joined = fabric(row, card)
        elif card in SPECS and row["p2p(yes/no/unknown)"] == "no" and row["time_us"]:
            group, joined = "one node, no NVLink", Fabric.of(SPECS[card])
        else:
            continue
        kind, nbytes = KINDS.get(row["collective"], row["collective"]), int(row["message_bytes"])
        us = 1e6 * nccl.seconds(kind, nbytes, nodes * gpus, joined, nodes)
        found.append(Timed(group, kind, nodes, gpus, row["card"], nbytes, float(row["time_us"]), us, row["source"]))
    return found


def table(found: list[Timed]) -> str:
    """As text."""
    groups = defaultdict(list)
    for row in found:
        groups[row.group, row.size].append(row.log)
    titles = f"{'number':>7}{'simulated / measured':>22}{'lowest':>8}{'highest':>9}{'within 30 %':>13}"
    lines = [f"{'collectives':<36}{'message':<14}{titles}"]
    for group, size in itertools.product(dict.fromkeys(row.group for row in found), SIZES):
        if logs := groups[group, size]:
            low, middle, high = (math.exp(log) for log in (min(logs), median(logs), max(logs)))
            figures = f"{len(logs):>7}{middle:>22.2f}{low:>8.2f}{high:>9.2f}{within(logs, 30):>13.0%}"
            lines.append(f"{group:<36}{size:<14}{figures}")
    return "\n".join(lines)


def each(found: list[Timed]) -> str:
    """A line for each row, with GB/s on the bus."""
    lines = []
    for row in found:
        measured, simulated = row.bus
        what, us = f"{row.kind}, {row.nodes} x {row.gpus} {row.card}", f"{row.measured:>10.1f} us{row.simulated:>10.1f}"
        lines.append(f"{what:<34}{row.nbytes:>12}{us}{measured:>8.2f} GB/s{simulated:>8.2f}  {row.source}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(each(timed()) if "--all" in sys.argv else table(timed()))
