"""One rank of many: a dry run in one process plays it, and the others are taken to be like it.

Inside, `init_process_group` makes this process that rank, whatever backend is named. A collective begins when this rank has come to
it, and lasts as long as among all of them. Where ranks are not alike (a pipeline's stages, uneven shards), only this one is seen.
"""

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from virtualgpu.patches.registry import Patches


class Place(NamedTuple):
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

    def nodes(self, ranks: list[int]) -> int:
        """Over how many nodes these ranks are spread."""
        return len({rank // self.gpus_per_node for rank in ranks})


def place(world_size: int, rank: int = 0, gpus_per_node: int = 8) -> Place:
    """Raises ValueError for what cannot be."""
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0), ("gpus_per_node", gpus_per_node, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number, {least} at least")
    if rank >= world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to {world_size - 1}")
    return Place(world_size, rank, gpus_per_node)


def enter(machine, where: Place) -> Mapping[str, str | None]:
    """From now on this process is that rank; returns what the environment said before."""
    machine.alone = where
    before = {name: os.environ.get(name) for name in where.environ}
    os.environ.update(where.environ)
    return before


def leave(machine, before: Mapping[str, str | None]) -> None:
    machine.alone = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def install(machine, patches: Patches) -> None:
    from virtualgpu.distributed._compat import c10d

    init, new, backend_of = c10d.init_process_group, c10d.new_group, c10d.get_backend

    @functools.wraps(init)
    def init_process_group(*args, **kwargs):
        where = machine.alone
        if where is None:
            return init(*args, **kwargs)
        import torch.testing._internal.distributed.fake_pg  # older versions know the backend from there

        device = {"device_id": kwargs["device_id"]} if kwargs.get("device_id") is not None else {}
        store = torch.distributed.HashStore()
        return init("fake", rank=where.rank, world_size=where.world_size, store=store, **device)

    @functools.wraps(new)
    def new_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
        return new(ranks, timeout, backend if machine.alone is None else "fake", *args, **kwargs)

    @functools.wraps(backend_of)
    def get_backend(group=None):
        found = backend_of(group)
        return "nccl" if machine.alone is not None and found == "fake" else found

    patches.replace_everywhere(c10d, "init_process_group", init_process_group)
    patches.replace_everywhere(c10d, "new_group", new_group)
    patches.replace_everywhere(c10d, "get_backend", get_backend)
