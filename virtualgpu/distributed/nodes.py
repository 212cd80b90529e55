"""Where the ranks of a group are, and so how long what they send each other lasts.

A GPU's node is what torchrun says, where it says that there are several: each of its agents is one, also of agents on one machine.
Otherwise the machine's GPUs are divided as `gpus_per_node` says; and without that all are in one node.
"""

import os
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.distributed import place
from virtualgpu.hardware import networks
from virtualgpu.hardware.networks import Network
from virtualgpu.simulation import nccl


class Nodes(NamedTuple):
    """How a machine's GPUs are divided into nodes (None: they are one), and what joins nodes (None: PyTorch's figure for the card)."""

    gpus_per_node: int | None = None
    network: Network | None = None

    @classmethod
    def of(cls, gpus: int, gpus_per_node: int | None, network: str | Network | None) -> "Nodes":
        """Of that many GPUs. Raises ValueError for what cannot be."""
        if gpus_per_node is not None:
            place.nodes(gpus, gpus_per_node)
        return cls(gpus_per_node, None if network is None else networks.find(network))


ONE_NODE = Nodes()


class Where(NamedTuple):
    """One rank: its node, how many GPUs that has, and what joins them to each other and to other nodes."""

    node: int
    gpus: int
    fabric: nccl.Fabric

    @classmethod
    def of(cls, machine, gpu, environ: Mapping[str, str] = os.environ) -> "Where":
        """Where this process's GPU is. Reads torchrun's variables and NCCL's, at a group's first collective as NCCL does."""
        fabric = nccl.Fabric.of(gpu.spec, machine.network, environment.peer_to_peer(environ))
        local = environment.local_world_size(environ) or len(machine.specs)
        if machine.gpus_per_node is None or environment.has_several_nodes(environ):
            return cls(environment.node(environ), local, fabric)
        return cls(gpu.physical // machine.gpus_per_node, machine.gpus_per_node, fabric)

    def said(self) -> list:
        """As JSON carries it; `heard` reads it."""
        return [self.node, self.gpus, *vars(self.fabric).values()]

    @classmethod
    def heard(cls, said: list) -> "Where":
        node, gpus, *fabric = said
        return cls(node, gpus, nccl.Fabric(*fabric))


class Layout:
    """Where the ranks of a group are. Ranks count within the group."""

    def __init__(self, ranks: list[Where]):
        self.nodes = [rank.node for rank in ranks]
        members = Counter(self.nodes)
        self.count, self.size = len(members), len(ranks)
        self.fabric = nccl.slowest([rank.fabric.shared_by(members[rank.node], rank.gpus) for rank in ranks])

    def seconds(self, kind: str, nbytes: int) -> float:
        """Of one collective; `nbytes` as nccl.seconds counts."""
        return nccl.seconds(kind, nbytes, self.size, self.fabric, self.count)

    def message(self, nbytes: int, rank: int, peer: int) -> float:
        """Of one message, which crosses the network only where these two are on different nodes."""
        return nccl.seconds("p2p", nbytes, 2, self.fabric, 1 if self.nodes[rank] == self.nodes[peer] else 2)
