"""What ranks tell each other in a dry run: counts and sizes, small tensors of whole numbers, whose values stand beside them."""

import torch

from virtualgpu.distributed.calls import Call
from virtualgpu.engine import values

LARGEST = 8 * values.LIMIT  # bytes of a message that is carried


def counts(call: Call) -> Call | None:
    """The same collective of the values; None where it has none to carry: then those of its outputs are forgotten."""
    if (
        call.collective.alike is not None  # all ranks' outputs are alike: all of them carry, or none
        and sum(tensor.numel() for tensor in call.outputs) <= values.LIMIT
        and all(map(values.may_have_shadow, call.tensors))
    ):
        return call.with_values(values.shadow_of)
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
