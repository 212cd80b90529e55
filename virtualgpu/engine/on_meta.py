"""What a program itself puts on meta in a dry run, where every tensor without a GPU is really there and passes for the CPU's.

Programs ask `is_meta` before they give a parameter memory; FSDP2 refuses to train what was never given any.
"""

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import storage_of
from virtualgpu.engine.operations import Operation
from virtualgpu.errors import no_data

torch.UntypedStorage._virtual_on_meta = False  # unless it says otherwise


class Marks:
    """Has any tensor been marked? Until then nobody needs to look."""

    some = False


def put_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Mark it, by its storage; the same tensor."""
    storage_of(tensor)._virtual_on_meta = Marks.some = True
    return tensor


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Has the program put it there?"""
    return Marks.some and _compat.is_really_meta(tensor) and getattr(storage_of(tensor), "_virtual_on_meta", False)


def check(op: Operation, args, tensors) -> None:
    """Raises PyTorch's error where an operation needs numbers of a tensor on meta."""
    if op.returns_value_to_host and any(map(is_on_meta, tensors)):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")
    if op.copies and len(tensors) > 1 and is_on_meta(args[1]) and not is_on_meta(args[0]):
        raise no_data(made_in_dry_run=False)


def propagate(op: Operation, tensors, out) -> None:
    """What comes of tensors on meta is there, too."""
    if op.new and any(map(is_on_meta, tensors)):
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, torch.Tensor) and _compat.is_really_meta(made):
                put_on_meta(made)
