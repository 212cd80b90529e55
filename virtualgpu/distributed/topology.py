"""Where the ranks of a group are, and so how long what they send each other lasts.

A GPU's node is what torchrun says, where it says that there are several: each of its agents is one, also of agents on one machine.
Otherwise the machine's GPUs are divided as `gpus_per_node` says; and without that all are in one node.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.distributed.calls import refused_by_nccl
from virtualgpu.environment import bus_id
from virtualgpu.hardware.network import Fabric, slowest
from virtualgpu.timing import nccl


class Where(NamedTuple):
    """One rank: its node, how many GPUs that has, its own GPU of this machine ("": not known to other processes), and what joins
    GPUs to each other and nodes to each other."""

    node: int
    gpus: int
    card: str
    fabric: Fabric

    @classmethod
    def of(cls, machine, gpu, environ: Mapping[str, str] = os.environ) -> "Where":
        """Where this process's GPU is. Reads torchrun's variables and NCCL's, at a group's first collective as NCCL does."""
        settings = machine.settings
        fabric = Fabric.of(gpu.spec, settings.network, environment.peer_to_peer(environ))
        local = environment.local_world_size(environ) or len(machine.specs)
        card = f"{machine.ledger.folder} {gpu.physical}" if machine.ledger is not None else ""
        if settings.gpus_per_node is None or environment.has_several_nodes(environ):
            return cls(environment.node(environ), local, card, fabric)
        return cls(gpu.physical // settings.gpus_per_node, settings.gpus_per_node, card, fabric)

    def as_json(self) -> list:
        """What `of_json` reads in another process."""
        return [self.node, self.gpus, self.card, *vars(self.fabric).values()]

    @classmethod
    def of_json(cls, values: list) -> "Where":
        """The reverse of `as_json`."""
        node, gpus, card, *fabric = values
        return cls(node, gpus, card, Fabric(*fabric))


def one_gpu_each(ranks: list[Where]) -> None:
    """Raises NCCL's error (src/init.cc) where two ranks use one GPU: most often nobody called torch.cuda.set_device."""
    for rank, where in enumerate(ranks):
        for other in range(rank):
            if where.card and (where.node, where.card) == (ranks[other].node, ranks[other].card):
                bus = bus_id(int(where.card.split()[-1]))
                raise refused_by_nccl(
                    "NCCLUtils.cpp:93",
                    "invalid usage",
                    "This usually reflects invalid usage of NCCL library.",
                    f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {bus}: NCCL takes one GPU for each rank. "
                    "Call torch.cuda.set_device(local_rank) first, or start as many ranks as there are GPUs",
                )


class Layout:
    """Where the ranks of a group are. Ranks count within the group.

    seconds: (kind, nbytes as nccl.seconds counts) of one collective. duration: how that is found; `--explain` asks what none at all would gain.
    """

    duration: Callable[..., float] = staticmethod(nccl.seconds)

    def __init__(self, ranks: list[Where]):
        self.nodes = [rank.node for rank in ranks]
        members = Counter(self.nodes)
        self.count, self.size = len(members), len(ranks)
        self.fabric = slowest([rank.fabric.shared_by(members[rank.node], rank.gpus) for rank in ranks])
        last = {"ranks": self.size, "fabric": self.fabric, "nodes": self.count}
        self.seconds = functools.partial(Layout.duration, **last)

    def message(self, nbytes: int, rank: int, peer: int) -> float:
        """Of one message, which crosses the network only where these two are on different nodes."""
        nodes = 1 if self.nodes[rank] == self.nodes[peer] else 2
        return self.seconds("p2p", nbytes, ranks=2, nodes=nodes)

    def step(self, rank: int, peer: int) -> int:
        """Bytes of one of the steps (hardware.fabric.STEPS) in which NCCL's buffer between these two is filled."""
        return self.fabric.step(self.nodes[rank] == self.nodes[peer])
