"""Copies from one place to another: what they send, and what they need on a GPU beside (aten/src/ATen/native/cuda/Copy.cu).

Memory is sent as it lies: of one type, in one order, without gaps. What is not so is made so before, or put right afterwards, on the side
where types are converted: the host's, or, for a copy that the host does not wait for, the GPU's. A kernel there works through a tensor that
lives for the length of the copy. Between GPUs with peer access one kernel does it all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.timing.memory_bound import ELEMENTWISE


class Copy(NamedTuple):
    """sent: bytes from place to place. before, after: bytes of a tensor that is sent instead of the source, or into which instead of the target; 0
    if there is none."""

    sent: int
    before: int = 0
    after: int = 0


def of(target: Tensor, source: Tensor, converts_first: bool) -> Copy:
    """Of target.copy_(source). converts_first: types are converted where the source is. source may be smaller, as copy_ expands it."""
    count = target.numel()
    if target.dtype is source.dtype and _lie_alike(target, source):
        return Copy(target.nbytes)
    sent = count * (target if converts_first else source).dtype.itemsize
    same = target.dtype is source.dtype
    as_it_lies = source.is_contiguous() and source.numel() == count and (same or not converts_first)
    into_it = target.is_contiguous() and (same or converts_first)
    return Copy(sent, 0 if as_it_lies else sent, 0 if into_it else sent)


def charge(machine: Machine, target: Tensor, source: Tensor, places: tuple, non_blocking: bool, pinned: bool) -> None:
    """The time and the memory of target.copy_(source). places: the GPU of the target and that of the source, None for the host, and not the same.
    pinned: is the host's memory? Raises torch.OutOfMemoryError."""
    to, came = places
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (target, source)):
        machine.charge_copy(came, to, source.numel() * source.element_size(), non_blocking, pinned)
        return
    if to is not None and came is not None and came.spec.peer_access and to.spec.peer_access:
        machine.charge_copy(came, to, target.nbytes)
        return
    copy = of(target, source, (came is not None) == non_blocking)
    if copy.before and came is not None:
        came.lend([copy.before])
        _launch(machine, came, copy.before, source)
    if copy.after and to is not None:
        to.lend([copy.after])
    machine.charge_copy(came, to, copy.sent, non_blocking, pinned)
    if copy.after and to is not None:
        _launch(machine, to, copy.after, target)


def _launch(machine: Machine, gpu: GPU, nbytes: int, tensor: Tensor) -> None:
    """A kernel that reads `tensor` and writes so many bytes, or the other way round."""
    machine.clock.launch(gpu.index, gpu.kernels.moving(nbytes + tensor.nbytes, ELEMENTWISE), "copy_")


def _lie_alike(target: Tensor, source: Tensor) -> bool:
    if target.shape != source.shape:
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    return target.stride() == source.stride() and torch.ops.aten.is_non_overlapping_and_dense(target)
