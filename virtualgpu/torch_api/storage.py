"""Storages on virtual GPUs: where they say they are, how they are made, resized and moved."""

import functools

import torch

from virtualgpu.engine.allocation import ALLOCATION, PINNED, Allocation, set_allocation
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.torch_api.registry import Patches

CPU = torch.device("cpu")


def install(machine: Machine, patches: Patches) -> None:
    """Replace UntypedStorage's methods."""
    Storage, local = torch.UntypedStorage, machine.local
    real_device = Storage.device.__get__
    resize_, clone, share, real_data_ptr = Storage.resize_, Storage.clone, Storage._share_cuda_, Storage.data_ptr

    def gpu_of(storage) -> GPU | None:
        allocation = getattr(storage, ALLOCATION, None)
        return None if allocation is None else allocation.gpu

    def device(storage) -> torch.device:
        gpu = None if local.bypass else gpu_of(storage)
        if gpu is not None:
            return gpu.device
        real = real_device(storage)
        return CPU if real.type == "meta" and machine.dry and not local.bypass else real

    def make(cls, *args, device=None, **kwargs):
        """UntypedStorage(4, device="cuda")."""
        where = None if device is None or local.bypass else torch.device(device)
        if where is None or where.type != "cuda":
            return original_new(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        return machine.place_storage(original_new(cls, *args, device=machine.base, **kwargs), machine.gpu(where))

    def to(storage, *, device, non_blocking: bool = False):
        target = machine.gpu(device)
        if target is gpu_of(storage):
            return storage
        with machine.untracked():
            made = meta_storage(storage) if machine.dry and target else clone(storage)
        machine.place_storage(made, target)
        machine.charge_copy(gpu_of(storage), target, storage.nbytes(), wait=not non_blocking)
        return made

    def cuda(storage, device=None, non_blocking: bool = False):
        return to(storage, device=machine.gpu("cuda" if device is None else device).device, non_blocking=non_blocking)

    def cpu(storage):
        return to(storage, device=CPU)

    @functools.wraps(clone)
    def clone_there(storage):
        with machine.untracked():
            copy = clone(storage)
        gpu = gpu_of(storage)
        return copy if gpu is None else machine.place_storage(copy, gpu)

    @functools.wraps(resize_)
    def resize_and_count(storage, size: int):
        """FSDP gives the memory of gathered parameters back in this way."""
        allocation = getattr(storage, ALLOCATION, None)
        if allocation is None or allocation.gpu is None or size == allocation.nbytes:
            return resize_(storage, size)
        gpu = allocation.gpu
        room = Allocation(gpu, size)  # PyTorch, too, has both for a moment: the bytes are copied over
        out = resize_(storage, size)
        set_allocation(storage, room)
        return out

    def share_cuda(storage, *args, **kwargs):
        if gpu_of(storage) is None:
            return share(storage, *args, **kwargs)
        raise NotImplementedError(
            "GPU memory shared between processes (CUDA IPC) is not modelled by virtual GPUs: send tensor.cpu()"
        )

    def data_ptr(storage) -> int:
        allocation = getattr(storage, ALLOCATION, None)
        if allocation is None or allocation.gpu is None or local.bypass:
            return real_data_ptr(storage)
        return 0 if allocation.block is None else allocation.block.address

    original_new = Storage.__new__
    patches.replace(Storage, "device", property(device))
    patches.replace(Storage, "__new__", staticmethod(make))
    for name, function in {
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "clone": clone_there,
        "resize_": resize_and_count,
        "_share_cuda_": share_cuda,
        "data_ptr": data_ptr,
        "is_pinned": lambda storage, device=None: getattr(storage, PINNED, False),
    }.items():
        patches.replace(Storage, name, function)


def meta_storage(storage):
    """As large, in a dry run: on a GPU nothing has values there."""
    return torch.UntypedStorage(storage.nbytes(), device="meta")
