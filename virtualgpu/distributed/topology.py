"""Where the ranks of a group are, and so how long what they send each other lasts; and which of many a process plays alone.

A GPU's node is what torchrun says, where it says that there are several: each of its agents is one, also of agents on one machine.
Otherwise the machine's GPUs are divided as `gpus_per_node` says; and without that all are in one node.

A dry run in one process plays one rank, and the others are taken to be like it. Inside, `init_process_group` makes this process that
rank, whatever backend is named. A collective begins when this rank has come to it, and lasts as long as among all of them. Where ranks are
not alike (a pipeline's stages, uneven shards), only this one is seen. The runner, which does without PyTorch, asks here too.
"""

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.hardware.machine import Fabric, check_number, slowest


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


class Layout:
    """Where the ranks of a group are. Ranks count within the group.

    seconds: (kind, nbytes as nccl.seconds counts) of one collective. duration: nccl.seconds, or what `--explain` puts in its place:
    what would be gained if none took any time.
    """

    duration: Callable[..., float] | None = None

    def __init__(self, ranks: list[Where]):
        from virtualgpu.timing import nccl  # with PyTorch

        self.nodes = [rank.node for rank in ranks]
        members = Counter(self.nodes)
        self.fabric = slowest([rank.fabric.shared_by(members[rank.node], rank.gpus) for rank in ranks])
        duration = Layout.duration or nccl.seconds
        self.seconds = functools.partial(duration, ranks=len(ranks), fabric=self.fabric, nodes=len(members))

    def message(self, nbytes: int, rank: int, peer: int) -> float:
        """Of one message, which crosses the network only where these two are on different nodes."""
        nodes = 1 if self.nodes[rank] == self.nodes[peer] else 2
        return self.seconds("p2p", nbytes, ranks=2, nodes=nodes)

    def step(self, rank: int, peer: int) -> int:
        """Bytes of one of the steps (hardware.machine.STEPS) in which NCCL's buffer between these two is filled."""
        return self.fabric.step(self.nodes[rank] == self.nodes[peer])


# -- The rank that a process plays alone


class RankConfig(NamedTuple):
    """Which rank of how many, and how many GPUs a node has."""

    world_size: int
    rank: int = 0
    gpus_per_node: int = 8

    @classmethod
    def checked(cls, world_size: int, rank: int = 0, gpus_per_node: int = 8) -> "RankConfig":
        """Raises ValueError for what cannot be."""
        for name, value, least in (
            ("world_size", world_size, 1),
            ("rank", rank, 0),
            ("gpus_per_node", gpus_per_node, 1),
        ):
            check_number(name, value, least)
        if rank >= world_size:
            raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to {world_size - 1}")
        return cls(world_size, rank, gpus_per_node)

    @property
    def environ(self) -> dict[str, str]:
        """What torchrun would say to it. The process has one GPU, so that its local rank is 0."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": min(self.gpus_per_node, self.world_size),
            "GROUP_RANK": self.node(self.rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 29500,
        }
        return {name: str(value) for name, value in numbers.items()}

    def node(self, rank: int) -> int:
        """The node of a rank, from 0: ranks fill one node after the other."""
        return rank // self.gpus_per_node


class Before(NamedTuple):
    """What this process was before it played a rank: which other one it played, if any, and what the environment said."""

    rank: RankConfig | None
    has_groups: bool
    environ: Mapping[str, str | None]


def enter(machine, rank: RankConfig) -> Before:
    """From now on this process is that rank; returns what it was before."""
    before = Before(machine.single_rank, _has_groups(), {name: os.environ.get(name) for name in rank.environ})
    machine.play(rank)
    os.environ.update(rank.environ)
    return before


def leave(machine, before: Before) -> None:
    """This process is what it was `before`; process groups that it has made since are destroyed."""
    machine.play(before.rank)
    if _has_groups() and not before.has_groups:
        sys.modules["torch.distributed"].destroy_process_group()
    environment.restore(before.environ)


def _has_groups() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
