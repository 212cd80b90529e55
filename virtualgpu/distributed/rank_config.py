"""Which rank of how many one process plays alone, checked in one place: the runner, which does without PyTorch, asks here too.

A dry run in one process plays that rank, and the others are taken to be like it. Inside, `init_process_group` makes this process that
rank, whatever backend is named. A collective begins when this rank has come to it, and lasts as long as among all of them. Where ranks are
not alike (a pipeline's stages, uneven shards), only this one is seen.
"""

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from virtualgpu import environment
from virtualgpu.hardware.machine import check_number


class RankConfig(NamedTuple):
    """Which rank of how many, and how many GPUs a node has."""

    world_size: int
    rank: int = 0
    gpus_per_node: int = 8

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


def make(world_size: int, rank: int = 0, gpus_per_node: int = 8) -> RankConfig:
    """Raises ValueError for what cannot be."""
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0), ("gpus_per_node", gpus_per_node, 1)):
        check_number(name, value, least)
    if rank >= world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to {world_size - 1}")
    return RankConfig(world_size, rank, gpus_per_node)


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
    dist = sys.modules.get("torch.distributed")  # this file does without PyTorch
    return dist is not None and dist.is_available() and dist.is_initialized()
