"""What ranks tell each other in a dry run: counts and sizes, small tensors of whole numbers, whose values stand beside them."""

import torch
from torch import distributed as dist

from virtualgpu.distributed.calls import Call
from virtualgpu.engine import values

LARGEST = 8 * values.LIMIT  # bytes of a message that is carried
CARRIED = ("all_reduce", "all_gather", "broadcast")  # where all ranks' outputs are alike: all of them carry, or none


def counts(call: Call) -> Call | None:
    """The same collective of the values; None where it has none to carry: then those of its outputs are forgotten."""
    if (
        call.kind in CARRIED
        and sum(tensor.numel() for tensor in call.outputs) <= values.LIMIT
        and all(map(values.may_have_shadow, call.tensors))
    ):
        pairs = [tuple([values.shadow_of(tensor) for tensor in side] for side in pair) for pair in call.pairs]
        return Call(call.kind, pairs, call.nbytes, call.op, call.root)
    values.invalidate(call.outputs)
    return None


def message_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a message carries in this tensor's place: its values, or as many bytes that nobody reads, since sender and receiver need
    to agree on a message's bytes alone. None: it is large, and carries nothing.
    """
    if tensor.nbytes > LARGEST:
        return None
    if values.may_have_shadow(tensor):
        return values.shadow_of(tensor)
    return torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")


class SymmetricBackend:
    """In gloo's place where one rank is played alone: what it would carry if all ranks gave what this one gives.

    What another rank broadcasts is not known: 0.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def allreduce(self, tensors: list[torch.Tensor], options) -> "SymmetricBackend":
        """options.reduceOp: a sum and a product count all ranks; others leave the tensor as it is."""
        if options.reduceOp == dist.ReduceOp.SUM:
            tensors[0].mul_(self.size)
        elif options.reduceOp == dist.ReduceOp.PRODUCT:
            tensors[0].pow_(self.size)
        return self

    def broadcast(self, tensors: list[torch.Tensor], options) -> "SymmetricBackend":
        """options.rootRank: who sends."""
        if options.rootRank != self.rank:
            tensors[0].zero_()
        return self

    def _allgather_base(self, whole: torch.Tensor, given: torch.Tensor, options) -> "SymmetricBackend":
        whole.view(self.size, -1)[:] = given
        return self

    def wait(self) -> None:
        """It is done when it has begun."""
