"""What ranks tell each other in a dry run: counts, sizes and measured times, small tensors whose values stand beside them. Each says whether
it knows its own: where one does not, nobody knows what comes of them."""

import torch
from torch import distributed as dist

from virtualgpu.distributed.calls import Call, size_of
from virtualgpu.distributed.transport import Transfer, flat
from virtualgpu.engine import values
from virtualgpu.engine.allocation import reach

LARGEST = 8 * values.LIMIT  # bytes of a message that is carried


class Told:
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

    def by(self, transfer: Transfer) -> None:
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
