"""DLPack: a tensor on a virtual GPU leaves as one on a GPU, and comes back to the same memory of the same GPU.

C++ writes into the capsule that the bytes are the CPU's. NumPy and its kind would read them from there, as they never could on a real
GPU; so the capsule says CUDA, and only torch.from_dlpack knows better.
"""

import ctypes
import weakref

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.torch_api.registry import Patches

CPU, CUDA = 1, 2  # dlpack.h: kDLCPU, kDLCUDA
# Where a capsule of this name has the device's two numbers: after `data`; in the later version, after five fields more
DEVICE_AT = {b"dltensor": 8, b"dltensor_versioned": 40}

_name = ctypes.pythonapi.PyCapsule_GetName
_name.argtypes, _name.restype = [ctypes.py_object], ctypes.c_char_p
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch's C functions for capsules; a capsule of a GPU that comes back is the same storage again."""
    capsules = Capsules(machine)
    for owner, name in (
        (_compat.C, "_to_dlpack"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
        (_compat.C, "_to_dlpack_versioned"),
    ):
        patches.stand_in(owner, name, capsules.give)
    patches.stand_in(_compat.C, "_from_dlpack", capsules.take)
    patches.stand_in(_compat.C, "_torchDeviceToDLDevice", capsules.numbers)


class Capsules:
    """Those that have left, and what makes and takes one."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.storages = weakref.WeakValueDictionary()  # under way, by the address of what describes their tensor

    def give(self, original, tensor, *, dl_device=None, copy=None, **options):
        """A capsule of the tensor, on the device with those two numbers. Raises BufferError in a dry run, ValueError where it may not copy."""
        gpu = gpu_of(tensor)
        if _compat.is_really_meta(tensor) and (self.machine.dry or gpu is not None):
            raise BufferError(
                "this tensor comes from a dry run and has no values to export. Export it outside dry_run()"
            )
        if gpu is None and (dl_device is None or dl_device[0] != CUDA):
            return original(tensor, dl_device=dl_device, copy=copy, **options)
        target = gpu if dl_device is None else self.machine.gpu(_device(dl_device))
        if target is not gpu:
            source, there = ("cpu" if place is None else place.device for place in (gpu, target))
            if copy is False:
                raise ValueError(f"cannot move (i.e. copy=False) tensor from {source} to {there} without copying.")
            tensor = tensor.to(there)
        elif copy:
            tensor = tensor.clone()
        capsule = original(tensor, **options)
        if target is not None:
            self.storages[_write(capsule, CUDA, target.index)] = tensor.untyped_storage()
        return capsule

    def take(self, original, capsule):
        """The tensor of a capsule: one of ours is on the same memory of the same GPU."""
        name = _name(capsule)
        storage = self.storages.pop(_pointer(capsule, name), None) if name in DEVICE_AT else None
        if storage is None:
            return original(capsule)
        _write(capsule, CPU, 0)
        with self.machine.untracked():
            plain = original(capsule)
            offset = (plain.data_ptr() - storage.data_ptr()) // plain.element_size()
            return plain.new_empty(0).set_(storage, offset, plain.shape, plain.stride())

    def numbers(self, original, device):
        """DLPack's two numbers of a device; C++ does not know cuda:1 without a driver."""
        gpu: GPU | None = self.machine.gpu(device) if torch.device(device).type == "cuda" else None
        return original(device) if gpu is None else (CUDA, gpu.index)


def _device(numbers) -> torch.device:
    kind, index = numbers
    return torch.device("cuda", index) if int(kind) == CUDA else torch.device("cpu")


def _write(capsule, kind: int, index: int) -> int:
    """Let the capsule say this device; returns where its tensor is described."""
    name = _name(capsule)
    address = _pointer(capsule, name)
    device = (ctypes.c_int32 * 2).from_address(address + DEVICE_AT[name])
    device[0], device[1] = kind, index
    return address
