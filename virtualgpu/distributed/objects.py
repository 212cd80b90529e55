"""What ranks tell each other in a dry run, values included: counts and sizes in small tensors, and Python objects."""

import inspect

import torch
from torch import distributed as dist

from virtualgpu._compat.distributed import c10d
from virtualgpu.distributed.calls import Call, size_of
from virtualgpu.distributed.transport import Transfer, flat
from virtualgpu.engine import values
from virtualgpu.engine.machine import Machine, dry_runs
from virtualgpu.engine.storage import reach
from virtualgpu.torch_api.patches import Patches

# -- What ranks tell each other in a dry run: counts, sizes and measured times, small tensors whose values stand beside them. Each says whether
# it knows its own: where one does not, nobody knows what comes of them.

LARGEST = 8 * values.LIMIT  # bytes of a message that is carried


class DryCollective:
    """A collective of this rank, and what it knows of it. call: the same of values; None, where they are not carried: too many, or of a
    kind whose results are not alike on all ranks. Call it untracked."""

    def __init__(self, call: Call, rank: int):
        from_root = call.collective.root == "from"
        given = [] if from_root and rank != call.root else [tensor for _, inputs in call.pairs for tensor in inputs]
        self.filled = call.uses(rank)[0]
        self.origin = values.origin_of(given) or call.kind
        self.known = all(values.known_of(tensor) is not None for tensor in given)
        self.call = call.with_values(values.room_for) if _is_carried(call) else None
        if self.call is None:
            values.told(call.outputs, self.origin)

    def carried_by(self, transfer: Transfer) -> None:
        """After the values, ranks tell each other whether all of them are known."""
        unknown, options = torch.tensor([not self.known], dtype=torch.uint8, device="cpu"), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        transfer.begin("allreduce", options, [unknown])
        transfer.then(lambda: self._end(not unknown.item()))

    def alone(self, rank: int, size: int) -> None:
        """The other ranks are like this one."""
        self._end(self.known and self.call.collective.alike(self.call, rank, size))

    def _end(self, known: bool) -> None:
        values.told(self.filled, None if known else self.origin)


def _is_carried(call: Call) -> bool:
    """The same on all ranks: it goes by what their tensors have in common."""
    if call.collective.alike is None or not call.tensors:
        return False
    if call.collective.root and call.collective.checks:
        nbytes = call.nbytes  # of a gather or scatter: all parts are of one size
    else:
        nbytes = size_of(call.tensors if call.collective.scatters else call.outputs)
    counts = all(tensor.dtype in values.COUNTS for tensor in call.tensors)
    return nbytes <= (values.LIMIT * call.tensors[0].element_size() if counts else values.SMALL)


def message_of(tensor: torch.Tensor, sends: bool) -> torch.Tensor | None:
    """What a message carries in this tensor's place: its values, or as many bytes that nobody reads, since sender and receiver need
    to agree on a message's bytes alone; and whether it has none. None: it is large, and carries nothing.
    """
    if tensor.nbytes > LARGEST:
        return None
    message = torch.zeros(extent(tensor) + 1, dtype=torch.uint8, device="cpu")
    known = values.known_of(tensor) if sends else None
    if known is None:
        message[-1] = 1
    else:
        message[:-1] = flat(known).view(torch.uint8)[: extent(tensor)]
    return message


def hear(tensor: torch.Tensor, message: torch.Tensor) -> None:
    """It has what came by a message. Call it untracked."""
    if not message[-1]:
        flat(values.room_for(tensor)).view(torch.uint8)[: extent(tensor)] = message[:-1]
        values.told([tensor])


def extent(tensor: torch.Tensor) -> int:
    """How many bytes of memory the tensor reaches over: fewer than its elements have where these share memory (expand)."""
    return tensor.element_size() * reach(tensor)


# -- Python objects that ranks send each other have values in a dry run, too: they travel as small tensors with numbers.
#
# A rank that is played alone has nobody to tell it anything: where each rank has an object, the others' are taken to be like its own,
# and what another rank alone knows raises NotImplementedError.


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
