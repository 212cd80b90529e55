"""Python objects that ranks send each other have values in a dry run, too: they travel as small tensors with numbers.

A rank that is played alone has nobody to tell it anything: where each rank has an object, the others' are taken to be like its own,
and what another rank alone knows raises NotImplementedError.
"""

import functools
import inspect

from torch import distributed as dist

from virtualgpu.engine.machine import Machine
from virtualgpu.engine.thread_context import dry_runs
from virtualgpu.torch_api.registry import Patches

OF_ONE_RANK = ("broadcast_object_list", "scatter_object_list", "recv_object_list")  # what `src` alone knows
NAMES = (*OF_ONE_RANK, "send_object_list", "all_gather_object", "gather_object")


def install(machine: Machine, patches: Patches) -> None:
    """Replace c10d's functions that send Python objects (NAMES), also where they were imported by name."""
    from virtualgpu.distributed._compat import c10d

    for name in NAMES:
        patches.replace_everywhere(c10d, name, _of_objects(machine, getattr(c10d, name)))


def with_numbers(machine: Machine, original):
    """The function, with numbers also in a dry run: for the thread that calls it."""

    @functools.wraps(original)
    def function(*args, **kwargs):
        if not machine.some_dry:
            return original(*args, **kwargs)
        with dry_runs.set_here(False):
            return original(*args, **kwargs)

    return function


def _of_objects(machine: Machine, original):
    signature, numbers = inspect.signature(original), with_numbers(machine, original)

    @functools.wraps(original)
    def function(*args, **kwargs):
        if machine.single_rank is not None:
            return _alone(original.__name__, signature.bind(*args, **kwargs).arguments)
        return numbers(*args, **kwargs)

    return function


def _alone(name: str, given: dict) -> None:
    group = given.get("group") or dist.group.WORLD
    if name == "all_gather_object":
        given["object_list"][:] = [given["obj"]] * group.size()
    elif name == "gather_object" and given.get("object_gather_list") is not None:
        given["object_gather_list"][:] = [given["obj"]] * group.size()
    elif name in OF_ONE_RANK and not _is_this_rank(group, given):
        raise NotImplementedError(
            f"{name}: this process plays rank {dist.get_rank()} alone, and nobody tells it another rank's objects. Play the rank that "
            "knows them (rank=), or start all ranks. A PipelineStage asks for none that is given input_args= and output_args="
        )
    elif name == "scatter_object_list":
        given["scatter_object_output_list"][0] = given["scatter_object_input_list"][group.rank()]


def _is_this_rank(group, given: dict) -> bool:
    if given.get("group_src") is not None:
        return given["group_src"] == group.rank()
    return (given.get("src") or 0) == dist.get_rank()
