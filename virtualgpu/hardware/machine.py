"""What a machine is beside its cards: what joins GPUs in a node and nodes in a cluster, as NCCL counts it (data/networks.toml, data/nccl.toml), its
host (data/hosts.toml) and its clock."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from virtualgpu.hardware import datasheet, units
from virtualgpu.hardware.datasheet import PCIE4, Spec
from virtualgpu.hardware.units import PLAUSIBLE, quantity

# -- What joins the nodes of a cluster: data/networks.toml, with sources, and figures of one's own.
#
# A latency of their own none of them has in NCCL's model: net_ib and net_socket leave it at 0, and every step over a network costs the
# same (timing/nccl.py). TCP's share of the line, and what it asks of the CPU, are in neither: with sockets a simulated time is a lower
# bound.


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
    units.check_keys(values, ["rate", "shared"])
    network = _of_rate(str(values.get("rate")))
    if network is None:
        raise ValueError('must say its rate, such as rate = "100 Gb/s"')
    return Network(name, network.bandwidth, values.get("shared", False))


NETWORKS = units.read("networks", _network)


def find_network(network: str | Network) -> Network:
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


# -- What joins the GPUs of a group, as NCCL counts it (data/nccl.toml; through the host's memory as others measured it: links). In GB/s.


VOLTA, BLACKWELL = 7, 10  # generations of GPU
TABLE = units.rows("nccl")
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
    memory. one_way: GB/s where data go to the other of a pair so staged and none come back, as a ring's do. members: GPUs of the group on the
    node that has fewest, and so network cards by which a ring leaves it, where each has its own (0: not known).
    """

    generation: int
    nvlink: bool
    inside: float
    between: float
    shared: bool = False
    neighbour: float = math.inf
    staged: bool = False
    one_way: float = 0.0
    members: int = 0

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
            ring, one_way = datasheet.ring(spec.capability, spec.host) / 1e9, PCIE_SHARE * spec.host.bandwidth / 1e9
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
        return replace(self, inside=inside, between=between, members=members)


def slowest(fabrics: list[Fabric]) -> Fabric:
    """A ring is as fast as its slowest link, within the nodes and between them."""
    inside = min(fabrics, key=lambda fabric: (fabric.inside, fabric.between, fabric.generation))
    between = min(fabrics, key=lambda fabric: fabric.between)
    one_way, members = (min(getattr(one, name) for one in fabrics) for name in ("one_way", "members"))
    return replace(inside, between=between.between, shared=between.shared, one_way=one_way, members=members)


# -- The host: what PyTorch costs a processor for each operation that it gives to a GPU: data/hosts.toml, each with its source.
#
# A program whose kernels are shorter than that is bound by the host, whatever card it has.


class Host(NamedTuple):
    """Seconds an operation. forward: called from Python, through modules, with autograd's notes. backward: in autograd's own thread,
    without Python. optimizer: called from Python, without modules and notes. launch: of what is no kernel (a copy, an event), and of
    each further kernel of one operation. entry: each tensor of a list, for each list that an operation takes (`_foreach_add_` of 10 to 400
    tensors and three others beside an H100: 0.18 to 0.2 us). made: each tensor that such an operation makes (`_foreach_mul`,
    `_foreach_sqrt`: 2.3 to 2.7 us)."""

    name: str
    forward: float
    backward: float
    optimizer: float
    source: str
    launch: float = 4e-6
    entry: float = 0.2e-6
    made: float = 2.3e-6


def _host(name: str, values: dict[str, Any]) -> Host:
    units.check_keys(values, Host._fields[1:])
    seconds = {key: quantity(value, "s", key) for key, value in values.items() if key != "source"}
    return Host(name, **seconds, source=values["source"])


HOSTS = units.read("hosts", _host)
DEFAULT = "2026"
FREE = Host("free", 0.0, 0.0, 0.0, "no cost at all: what CUDA graphs come near to", 0.0, 0.0)  # for run.explain


# -- What a machine is beside its cards: what `clock=`, `host=`, `network=` and `gpus_per_node=` choose, in `gpus`, `dry_run` and the runner.


MEASURED, DATASHEET = "measured", "datasheet"


@dataclass(frozen=True)
class MachineSettings:
    """clock: MEASURED (kernels take what others measured on such cards) or DATASHEET (what the maker promises: a lower bound).
    host: what an operation costs the processor, a key of HOSTS. gpus_per_node: how the GPUs are divided into nodes; None: they
    are one. network: what joins nodes; None: what PyTorch's model of NCCL has for the card.
    """

    clock: str = MEASURED
    host: str = DEFAULT
    gpus_per_node: int | None = None
    network: Network | None = None


def find_settings(
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    network: str | Network | None = None,
    clock: str | None = None,
    host: str | None = None,
) -> MachineSettings:
    """Those of these names, for so many GPUs; None: as ever. Raises ValueError, naming what there is."""
    clock, host = clock or MEASURED, host or DEFAULT
    if clock not in (MEASURED, DATASHEET):
        raise ValueError(
            f"clock={clock!r}: choose {MEASURED} (what kernels reach) or {DATASHEET} (what the maker promises, a lower bound)"
        )
    if host not in HOSTS:
        raise ValueError(f"host={host!r}: choose one of {', '.join(HOSTS)}")
    if gpus is not None and gpus_per_node is not None:
        nodes(gpus, gpus_per_node)
    return MachineSettings(clock, host, gpus_per_node, None if network is None else find_network(network))


def nodes(gpus: int, gpus_per_node: int) -> int:
    """How many nodes a machine's GPUs make. Raises ValueError where that is no whole number."""
    check_number("gpus_per_node", gpus_per_node, 1)
    if gpus % gpus_per_node:
        raise ValueError(
            f"gpus_per_node={gpus_per_node} does not divide {gpus} GPUs into nodes: ask for a multiple of it"
        )
    return gpus // gpus_per_node


def check_number(name: str, value, least: int) -> None:
    """Raises ValueError for what is no whole number, or less than that."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} at least")
