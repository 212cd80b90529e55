"""How long a collective of NCCL lasts: PyTorch's own analytic model (torch/_inductor/comm_analysis.py), for any card of the table.

NCCL knows two algorithms and three protocols, estimates each, and takes the fastest (src/graph/tuning.cc). Written again because importing
PyTorch's takes two seconds a process, older versions have another one, and it knows four models of GPU; a test compares both. What it has no
formula for (broadcast, reduce, gather, scatter) follows tuning.cc, or counts the bytes that leave the root. Where we depart from it:

- It takes 24 GB/s for all that is no NVLink. NCCL goes through the host's memory unless a switch or NCCL_P2P_LEVEL lets cards reach each other
  (`Fabric.of`); what was measured there is in hardware.links.
- It has all of a GPU's NVLinks for any group (of a V100's six, two lead to one neighbour, so that a pair has 40 GB/s and not 120).
- It has an all_to_all pass a ring twice. Here each GPU sends the others their parts once: so counted two RTX 2080 Ti reach 4.6 GB/s, for 4.0 in
  an all_reduce, and four RTX 4090 18 in both (NVIDIA/nccl#1603).
- Broadcast and reduce of a pair through the host's memory go one way, at what PCI Express carries: 11.1 GB/s on the 2080 Ti, whose ring has
  4.0 (10 and 3.9 in NVIDIA/nccl#384; but on a slow host 0.96 and 0.89). No table of single messages was found: they have the ring's.

It knows no NVLS: eight H200 reach 482 GB/s in a large all-reduce, and 366 without it, for 370 here. Against tables of nccl-tests on eight A100 and
H200 it takes a third to a half of the time below 1 MiB, 0.7 to 0.95 of it at 16 to 128 MiB, and 0.98 above 1 GiB; through the host's memory, given
a machine's own bandwidth, 0.9 to 1.1 from 1 MiB on for 2 and 4 GPUs.

Bandwidths in GB/s and latencies in us, as in hardware/data/nccl.toml; `seconds` takes bytes and returns seconds.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace

from virtualgpu.hardware import links, tables
from virtualgpu.hardware.datasheet import PCIE4, Spec
from virtualgpu.hardware.networks import Network

TREE, RING = "tree", "ring"
LL, LL128, SIMPLE = "LL", "LL128", "simple"
PROTOCOLS = LL, LL128, SIMPLE
VOLTA, BLACKWELL = 7, 10  # generations of GPU
TABLE = tables.rows("nccl")
# Messages (init.cc, computeBuffSizes; NCCL_STEPS): a channel's buffer takes so many steps, of so many bytes over NVLink and elsewhere.
# Over PCI Express a message of up to 4 MiB takes one channel (enqueue.cc, addP2pToPlan)
STEPS, NVLINK_STEP, OTHER_STEP = 8, 512 << 10, 128 << 10
# It gives PCI Express 24 GB/s, which is NCCL's figure for generation 4 (graph/topo.h: 12 for 3.0, twice that for 4.0)
PCIE_SHARE = 24e9 / PCIE4.bandwidth


@dataclass(frozen=True)
class Fabric:
    """What joins the GPUs of a group. inside, between: GB/s a GPU can send within its node and to others. shared: all GPUs of a node
    send to others through one card, and `between` is what they have of it together (`shared_by` says what a group has). neighbour:
    GB/s to one other GPU of the node, where NVLinks are shared out among neighbours. staged: within the node data pass through the host's
    memory, which holds a ring (not a message) over several nodes up as well (PyTorch's model, for cards that reach each other, leaves the node out).
    one_way: GB/s where data go to the other of a pair so staged and none come back, as a ring's do.
    """

    generation: int
    nvlink: bool
    inside: float
    between: float
    shared: bool = False
    neighbour: float = math.inf
    staged: bool = False
    one_way: float = 0.0

    @property
    def blocks(self) -> int:
        """Of a kernel of NCCL, a block for each channel (NCCL's documentation, NCCL_MAX_CTAS): so many multiprocessors it holds."""
        return TABLE["channels"][str(self.generation)]

    def step(self, inside: bool) -> int:
        """Bytes of a message that one of NCCL's STEPS takes, between GPUs of a node or of two."""
        return NVLINK_STEP * self.blocks if self.nvlink and inside else OTHER_STEP

    @classmethod
    def of(cls, spec: Spec, network: Network | None = None, level: str = "PXB") -> "Fabric":
        """Of machines full of these cards. network: between them; unless given, PyTorch's figure for that generation of GPU.

        level: how far apart cards may be that reach each other's memory (environment.peer_to_peer); what is further apart, and cards without peer
        access, goes through the host's memory. No machine tells of a switch here: each card has a root port of its own, as in most cloud machines
        and workstations, and NCCL passes the host's bridge only where NCCL_P2P_LEVEL says so (src/graph/paths.cc: PATH_PXB). It would let two cards
        beside a processor of AMD (PATH_SYS): whose it is, is not known, and the slower way is taken.
        """
        generation = min(BLACKWELL, max(VOLTA, spec.capability[0]))
        network_card = TABLE["network"][str(generation)]
        if spec.nvlink and level != "LOC":
            each = TABLE["nvlink"]
            link = each.get("{}.{}".format(*spec.capability)) or each[str(max(6, min(BLACKWELL, spec.capability[0])))]
            fabric = cls(generation, True, spec.nvlink.links * link, network_card)
            if not (spec.nvlink.switch or spec.nvlink.bridge):
                lead = max(1, round(spec.peer.bandwidth / spec.nvlink.bandwidth))
                fabric = replace(fabric, neighbour=fabric.inside * lead / spec.nvlink.links)
        elif spec.peer_access and level == "SYS":
            fabric = cls(generation, False, spec.peer.bandwidth * PCIE_SHARE / 1e9, network_card)
        else:
            ring, one_way = links.ring(spec.capability, spec.host) / 1e9, PCIE_SHARE * spec.host.bandwidth / 1e9
            fabric = cls(generation, False, ring, network_card, staged=True, one_way=one_way)
        if network is None:
            return fabric
        # a network card sits behind PCI Express, as the GPU does
        return replace(fabric, between=min(network.bandwidth, spec.host.bandwidth) / 1e9, shared=network.shared)

    def shared_by(self, members: int, gpus: int) -> "Fabric":
        """For a group with `members` of a node's `gpus`. Where they share a card, the node's other GPUs are taken to be in such groups too, and to
        send at the same time: each group has its part of it. Of NVLinks that are shared out, those count that lead to other members: a ring uses
        two in a pair of V100s, four of each GPU in half of such a node (the quads of DGX-1's cube), and all six in the whole.
        """
        inside = min(self.inside, self.neighbour * max(1, members // 2))
        between = self.between * (min(1.0, members / gpus) if self.shared else 1.0)
        return replace(self, inside=inside, between=between, staged=self.staged and members > 1)


def slowest(fabrics: list[Fabric]) -> Fabric:
    """A ring is as fast as its slowest link, within the nodes and between them."""
    inside = min(fabrics, key=lambda fabric: (fabric.inside, fabric.between, fabric.generation))
    between = min(fabrics, key=lambda fabric: fabric.between)
    return replace(inside, between=between.between, shared=between.shared, one_way=min(one.one_way for one in fabrics))


@functools.lru_cache(maxsize=4096)
def seconds(kind: str, nbytes: int, ranks: int, fabric: Fabric, nodes: int = 1) -> float:
    """The time of one collective.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, barrier or p2p (one message).
    nbytes: of the whole, as NCCL counts: all that an all_gather or a gather returns, all that a reduce_scatter or a scatter is given.
    nodes: over how many the ranks are spread. A group of one takes no time.
    """
    if ranks <= 1:
        return 0.0
    if kind == "barrier":
        kind, nbytes = "all_reduce", 1
    # LL128's figures are NVLink's: none between nodes
    ways = itertools.product(
        (TREE, RING) if kind == "all_reduce" else (RING,), PROTOCOLS if nodes == 1 else (LL, SIMPLE)
    )
    return min(_microseconds(kind, nbytes, ranks, fabric, nodes, *way) for way in ways) * 1e-6


def _microseconds(kind, nbytes, ranks, fabric, nodes, algorithm, protocol) -> float:
    """By one algorithm and protocol."""
    if kind in ("broadcast", "reduce") and ranks == 2:
        fabric = replace(fabric, inside=max(fabric.inside, fabric.one_way))
    bandwidth, steps = _bus_bandwidth(kind, nbytes, fabric, nodes, algorithm, protocol), _steps(kind, ranks)
    if algorithm == TREE:
        size, share = int(math.log2(nbytes >> 6)) if nbytes >= 128 else 0, TABLE["tree_share"][protocol]
        bandwidth *= 0.5 * (share[size] if size < len(share) else 1.0)
    elif kind in ("gather", "scatter"):
        bandwidth *= ranks / (ranks - 1)  # all but the root's own part pass one link
    elif kind != "p2p":
        bandwidth *= ranks / steps
    return _latency(kind, ranks, fabric, nodes, algorithm, protocol, steps) + nbytes / (1000.0 * bandwidth)


def _steps(kind: str, ranks: int) -> int:
    around = {
        "p2p": 1,
        "all_reduce": 2 * (ranks - 1),
        "broadcast": ranks,
        "reduce": ranks,
        "gather": ranks,
        "scatter": ranks,
    }
    return around.get(kind, ranks - 1)


def _bus_bandwidth(kind: str, nbytes: int, fabric: Fabric, nodes: int, algorithm: str, protocol: str) -> float:
    bus = min(fabric.inside, fabric.neighbour) if kind == "p2p" else fabric.inside
    if nodes > 1 and fabric.shared:  # one card for a node: what follows is about several
        bus = min(bus, fabric.between)
    elif nodes > 1:  # calibrated by PyTorch against H100s over RoCE
        bus = fabric.between * (0.77 + 0.23 * min(1.0, (nodes - 1) / 7))
        if nodes > 2:
            bus *= (max(nbytes, 50_000_000) / 50_000_000) ** 0.17  # larger messages use more of a node's network cards
        if fabric.staged and kind != "p2p":  # one message passes the network alone
            bus = min(bus, fabric.inside)
    if protocol == SIMPLE and algorithm == RING:
        return bus
    generation = VOLTA if protocol == LL and nodes > 1 else fabric.generation
    most = TABLE["bound"]["ll" if protocol == LL else f"{algorithm}_{protocol}".lower()][str(generation)][
        min(nodes, 3) - 1
    ]
    if protocol == LL:
        return min(most, bus * (0.5 if algorithm == RING else 1 / 3.8))
    share = 0.92 if protocol == SIMPLE else 7 / 9 if algorithm == TREE and nodes == 1 else 120 / 128
    return min(bus * share, fabric.blocks * most)


def _latency(kind: str, ranks: int, fabric: Fabric, nodes: int, algorithm: str, protocol: str, steps: int) -> float:
    index = PROTOCOLS.index(protocol)
    # where several nodes take part, PyTorch's model has no PCI Express inside of them
    link = "nvlink" if fabric.nvlink or nodes > 1 else "host" if fabric.staged else "pcie"
    base, inside, between = (
        table[algorithm][index] for table in (TABLE["base"], TABLE["step"][link], TABLE["step"]["network"])
    )
    if nodes > 1:
        inside = max(inside, 3.0 if protocol == SIMPLE else 1.0)
    if algorithm == TREE:
        return base + 2 * ((ranks // nodes - 1) * inside + int(math.log2(nodes)) * between)
    crossing = 0 if nodes == 1 else (2 if kind == "all_reduce" else 1) * (nodes - 1)
    return base + (steps - crossing) * inside + crossing * between
