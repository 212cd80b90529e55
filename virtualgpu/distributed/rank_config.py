"""Which rank of how many one process plays alone, checked in one place: the runner, which does without PyTorch, asks here too."""

from typing import NamedTuple


class RankConfig(NamedTuple):
    """Which rank of how many, and how many GPUs a node has."""

    world_size: int
    rank: int = 0
    gpus_per_node: int = 8

    @property
    def environ(self) -> dict[str, str]:
        """What torchrun would say to it. The process has one GPU, so that its local rank is 0."""
        ranks = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": 0}
        ranks |= {
            "LOCAL_WORLD_SIZE": min(self.gpus_per_node, self.world_size),
            "GROUP_RANK": self.rank // self.gpus_per_node,
        }
        return {name: str(value) for name, value in ranks.items()} | {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }

    def node(self, rank: int) -> int:
        """The node of a rank, from 0: ranks fill one node after the other."""
        return rank // self.gpus_per_node


def make(world_size: int, rank: int = 0, gpus_per_node: int = 8) -> RankConfig:
    """Raises ValueError for what cannot be."""
    whole("world_size", world_size, 1)
    whole("rank", rank, 0)
    whole("gpus_per_node", gpus_per_node, 1)
    if rank >= world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to {world_size - 1}")
    return RankConfig(world_size, rank, gpus_per_node)


def nodes(gpus: int, gpus_per_node: int) -> int:
    """How many nodes a machine's GPUs make. Raises ValueError where that is no whole number."""
    whole("gpus_per_node", gpus_per_node, 1)
    if gpus % gpus_per_node:
        raise ValueError(
            f"gpus_per_node={gpus_per_node} does not divide {gpus} GPUs into nodes: ask for a multiple of it"
        )
    return gpus // gpus_per_node


def whole(name: str, value, least: int) -> None:
    """Raises ValueError unless it is a whole number of at least that."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} at least")
