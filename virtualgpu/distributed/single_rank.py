"""One rank of many: a dry run in one process plays it, and the others are taken to be like it.

Inside, `init_process_group` makes this process that rank, whatever backend is named. A collective begins when this rank has come to
it, and lasts as long as among all of them. Where ranks are not alike (a pipeline's stages, uneven shards), only this one is seen.
"""

import functools
import os
from collections.abc import Mapping

import torch

from virtualgpu.distributed.rank_config import RankConfig
from virtualgpu.torch_api.registry import Patches


def enter(machine, where: RankConfig) -> Mapping[str, str | None]:
    """From now on this process is that rank; returns what the environment said before."""
    machine.play(where)
    before = {name: os.environ.get(name) for name in where.environ}
    os.environ.update(where.environ)
    return before


def leave(machine, before: Mapping[str, str | None]) -> None:
    """This process plays no rank any more: its process groups are destroyed, the environment is as it was `before`."""
    machine.play(None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def install(machine, patches: Patches) -> None:
    """While a rank is played alone, groups are of PyTorch's fake backend, and get_backend says nccl."""
    from virtualgpu.distributed._compat import c10d

    init, new, backend_of = c10d.init_process_group, c10d.new_group, c10d.get_backend

    @functools.wraps(init)
    def init_process_group(*args, **kwargs):
        where = machine.single_rank
        if where is None:
            return init(*args, **kwargs)
        import torch.testing._internal.distributed.fake_pg  # older versions know the backend from there

        device = {"device_id": kwargs["device_id"]} if kwargs.get("device_id") is not None else {}
        store = torch.distributed.HashStore()
        return init("fake", rank=where.rank, world_size=where.world_size, store=store, **device)

    @functools.wraps(new)
    def new_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
        return new(ranks, timeout, backend if machine.single_rank is None else "fake", *args, **kwargs)

    @functools.wraps(backend_of)
    def get_backend(group=None):
        found = backend_of(group)
        return "nccl" if machine.single_rank is not None and found == "fake" else found

    patches.replace_everywhere(c10d, "init_process_group", init_process_group)
    patches.replace_everywhere(c10d, "new_group", new_group)
    patches.replace_everywhere(c10d, "get_backend", get_backend)
