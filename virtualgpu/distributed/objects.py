"""Python objects that ranks send each other have values in a dry run, too: they travel as small tensors with numbers.

A rank that is played alone has nobody to tell it anything: where each rank has an object, the others' are taken to be like its own,
and what another rank alone knows raises NotImplementedError.
"""

import inspect

from torch import distributed as dist

from virtualgpu._compat.distributed import c10d
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.thread_context import dry_runs
from virtualgpu.torch_api.registry import Patches

OF_ONE_RANK = ("broadcast_object_list", "scatter_object_list", "recv_object_list")  # what `src` alone knows
NAMES = (*OF_ONE_RANK, "send_object_list", "all_gather_object", "gather_object")


def install(machine: Machine, patches: Patches) -> None:
    """Replace c10d's functions that send Python objects (NAMES), also where they were imported by name."""
    for name in NAMES:
        patches.stand_in_everywhere(c10d, name, _of_objects, machine)


def with_numbers(machine: Machine, original, *args, **kwargs):
    """original(...), for this thread with numbers also in a dry run."""
    if not machine.some_dry:
        return original(*args, **kwargs)
    with dry_runs.set_here(False):
        return original(*args, **kwargs)


def _of_objects(machine: Machine, original, *args, **kwargs):
    if machine.single_rank is None:
        return with_numbers(machine, original, *args, **kwargs)
    name, arguments = original.__name__, inspect.signature(original).bind(*args, **kwargs).arguments
    group = arguments.get("group") or dist.group.WORLD
    if name == "all_gather_object":
        arguments["object_list"][:] = [arguments["obj"]] * group.size()
    elif name == "gather_object" and arguments.get("object_gather_list") is not None:
        arguments["object_gather_list"][:] = [arguments["obj"]] * group.size()
    elif name in OF_ONE_RANK and not _is_this_rank(group, arguments.get("src"), arguments.get("group_src")):
        raise NotImplementedError(
            f"{name}: this process plays rank {dist.get_rank()} alone, and nobody tells it another rank's objects. Play the rank that "
            "knows them (rank=), or start all ranks. A PipelineStage asks for none that is given input_args= and output_args="
        )
    elif name == "scatter_object_list":
        arguments["scatter_object_output_list"][0] = arguments["scatter_object_input_list"][group.rank()]


def _is_this_rank(group, src: int | None, group_src: int | None) -> bool:
    return (src or 0) == dist.get_rank() if group_src is None else group_src == group.rank()
