"""Storages on virtual GPUs: where they say they are, how they are made, resized and moved."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import ALLOCATION, PINNED, Allocation, gpu_of_storage, set_allocation
from virtualgpu.engine.values import SHADOW
from virtualgpu.errors import no_data
from virtualgpu.torch_api.patches import Patches, standing_in

CPU = torch.device("cpu")


def install(machine: Machine, patches: Patches) -> None:
    """Replace UntypedStorage's methods."""
    Storage, storages = torch.UntypedStorage, Storages(machine)
    patches.replace(Storage, "device", property(storages.device))
    patches.replace(Storage, "__new__", staticmethod(standing_in(Storage.__new__, storages.make)))
    patches.replace(Storage, "to", lambda *args, **kwargs: storages.to(*args, **kwargs))
    patches.replace(Storage, "cuda", lambda *args, **kwargs: storages.cuda(*args, **kwargs))
    patches.replace(Storage, "cpu", lambda storage: storages.to(storage, device=CPU))
    patches.replace(Storage, "is_pinned", lambda storage, device=None: getattr(storage, PINNED, False))
    patches.stand_in(
        Storage, "is_shared", lambda original, storage: gpu_of_storage(storage) is not None or original(storage)
    )
    patches.stand_in(Storage, "clone", storages.clone)
    patches.stand_in(Storage, "resize_", resize_)
    patches.stand_in(Storage, "_share_cuda_", share_cuda)
    patches.stand_in(Storage, "data_ptr", storages.data_ptr)


class Storages:
    """The methods that need the machine."""

    def __init__(self, machine: Machine):
        self.machine, self.local = machine, machine.local
        self.copy = torch.UntypedStorage.clone

    def device(self, storage) -> torch.device:
        """UntypedStorage.device."""
        gpu = None if self.local.bypass else gpu_of_storage(storage)
        if gpu is not None:
            return gpu.device
        real = _compat.real_storage_device(storage)
        as_cpu = self.machine.dry and not self.local.bypass and not storage._virtual_on_meta
        return CPU if real.type == "meta" and as_cpu else real

    def make(self, original, cls, *args, device=None, **kwargs):
        """UntypedStorage(4, device="cuda")."""
        target = None if device is None or self.local.bypass else torch.device(device)
        if target is None or target.type != "cuda":
            return original(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        storage = original(cls, *args, device=self.machine.base, **kwargs)
        return self.machine.place_storage(storage, self.machine.gpu(target))

    def to(self, storage, *, device, non_blocking: bool = False):
        """A copy on `device`; the storage itself where it is there already. What the host does not wait for is pinned there."""
        machine, source, target = self.machine, gpu_of_storage(storage), self.machine.gpu(device)
        real = _compat.real_storage_device(storage).type
        if machine.real_gpus and real == "cuda":  # made before these GPUs were on
            with machine.untracked():
                storage = torch.UntypedStorage(storage.nbytes(), device="cpu").copy_(storage)
        if real == "meta" and not machine.dry and torch.device(device).type != "meta":
            raise no_data(made_in_dry_run=source is not None)
        if target is source:
            return storage
        with machine.untracked():
            out = meta_storage(storage) if machine.dry and target else self.copy(storage)
        machine.place_storage(out, target)
        if target is None and non_blocking:
            setattr(out, PINNED, True)
        pinned = getattr(storage, PINNED, False) or getattr(out, PINNED, False)
        machine.charge_copy(source, target, storage.nbytes(), non_blocking, pinned)
        return out

    def cuda(self, storage, device=None, non_blocking: bool = False):
        """UntypedStorage.cuda; without a device, on the current GPU."""
        gpu = self.machine.gpu("cuda" if device is None else device)
        return self.to(storage, device=gpu.device, non_blocking=non_blocking)

    def clone(self, original, storage):
        """On the same GPU."""
        with self.machine.untracked():
            copy = original(storage)
        gpu = gpu_of_storage(storage)
        return copy if gpu is None else self.machine.place_storage(copy, gpu)

    def data_ptr(self, original, storage) -> int:
        """On a GPU, the address of its block."""
        allocation = getattr(storage, ALLOCATION, None)
        if allocation is None or allocation.gpu is None or self.local.bypass:
            return original(storage)
        return 0 if allocation.block is None else allocation.block.address


def resize_(original, storage, size: int):
    """FSDP gives the memory of gathered parameters back in this way."""
    if storage.nbytes() != size:
        setattr(storage, SHADOW, None)
    allocation = getattr(storage, ALLOCATION, None)
    if allocation is None or allocation.gpu is None or size == allocation.nbytes:
        return original(storage, size)
    room = Allocation(allocation.gpu, size)  # PyTorch, too, has both for a moment: the bytes are copied over
    out = original(storage, size)
    set_allocation(storage, room)
    return out


def share_cuda(original, storage, *args, **kwargs):
    """For another process. Raises NotImplementedError on a GPU."""
    if gpu_of_storage(storage) is None:
        return original(storage, *args, **kwargs)
    refuse_to_share()


def refuse_to_share():
    """Raises NotImplementedError."""
    raise NotImplementedError(
        "GPU memory shared between processes (CUDA IPC) is not modelled by virtual GPUs: send tensor.cpu()"
    )


def meta_storage(storage):
    """As large, in a dry run: on a GPU nothing has values there."""
    return torch.UntypedStorage(storage.nbytes(), device="meta")
