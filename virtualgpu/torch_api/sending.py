"""Tensors of the CPU that a dry run sends to another process, by a queue or from a loader's worker: a small one with its numbers, as
far as they are known, any other as a shape. There they are what came from there: `saving`. A GPU's tensor is refused."""

import threading
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing.reductions import reduce_tensor

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.values import known_of
from virtualgpu.torch_api.registry import Patches, standing_in
from virtualgpu.torch_api.storage import refuse_to_share


def install(machine: Machine, patches: Patches) -> None:
    """Replace what pickles tensors for other processes, and what puts them into memory that several processes see."""
    replaced = standing_in(reduce_tensor, _reduce, machine)
    for kind in KINDS:
        ForkingPickler.register(kind, replaced)
    patches.undo(lambda: [ForkingPickler.register(kind, reduce_tensor) for kind in KINDS])
    patches.stand_in(torch.UntypedStorage, "share_memory_", _share)
    patches.wrap(torch.UntypedStorage, "_new_shared", lambda original: staticmethod(standing_in(original, _new_shared)))
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        patches.stand_in(torch.UntypedStorage, name, _untracked, machine)


KINDS = (torch.Tensor, torch.nn.Parameter)
# multiprocessing.Queue pickles in this thread, which drops what fails there, and who waits for it waits for ever: he gets the error
FEEDER = "QueueFeederThread"


def _reduce(machine: Machine, original, tensor: torch.Tensor):
    if gpu_of(tensor) is not None and threading.current_thread().name == FEEDER:
        return refuse_to_share, ()
    if not _compat.is_really_meta(tensor) or gpu_of(tensor) is not None or not tensor.is_leaf:
        return original(tensor)
    with machine.untracked():
        values = known_of(tensor)
        if values is None:
            return original(tensor)
        values = values.detach().requires_grad_(tensor.requires_grad)
        return original(
            torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values
        )


def _share(original, storage):
    """What has no values has none to share."""
    return storage if _compat.real_storage_device(storage).type == "meta" else original(storage)


def _new_shared(original, size: int, *, device="cpu"):
    """Nor to be shared: a loader's batch. PyTorch 2.11 makes it on the CPU, where no shape of it can lie."""
    if torch.device(device).type == "meta":
        return torch.UntypedStorage(size, device="meta")
    return original(size, device=device)


def _untracked(machine: Machine, original, storage, *args, **kwargs):
    """C++ copies the numbers by operations, which a dry run would take for the program's."""
    with machine.untracked():
        return original(storage, *args, **kwargs)
