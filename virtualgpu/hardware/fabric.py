"""What joins the GPUs of a group, as NCCL counts it (data/nccl.toml; through the host's memory as others measured it: links). In GB/s."""

import math
from dataclasses import dataclass, replace

from virtualgpu.hardware import links, tables
from virtualgpu.hardware.datasheet import PCIE4, Spec
from virtualgpu.hardware.networks import Network

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
