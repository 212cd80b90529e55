"""DLPack: a tensor on a virtual GPU leaves as one on a GPU, and comes back to the same memory of the same GPU.

C++ writes into the capsule that the bytes are the CPU's. NumPy and its kind would read them from there, as they never could on a real
GPU; so the capsule says CUDA, and only torch.from_dlpack knows better.
"""

import ctypes
import functools
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
    given = weakref.WeakValueDictionary()  # storages under way, by the address of what describes their tensor
    take = _compat.from_dlpack

    def giving(original):
        @functools.wraps(original)
        def to_dlpack(tensor, *, dl_device=None, copy=None, **options):
            gpu = gpu_of(tensor)
            if _compat.is_really_meta(tensor) and (machine.dry or gpu is not None):
                raise BufferError(
                    "this tensor comes from a dry run and has no values to export. Export it outside dry_run()"
                )
            if gpu is None and (dl_device is None or dl_device[0] != CUDA):
                return original(tensor, dl_device=dl_device, copy=copy, **options)
            target = gpu if dl_device is None else machine.gpu(_device(dl_device))
            if target is not gpu:
                if copy is False:
                    here = "cpu" if gpu is None else gpu.device
                    there = "cpu" if target is None else target.device
                    raise ValueError(f"cannot move (i.e. copy=False) tensor from {here} to {there} without copying.")
                tensor = tensor.to("cpu" if target is None else target.device)
            elif copy:
                tensor = tensor.clone()
            capsule = original(tensor, **options)
            if target is not None:
                given[_write(capsule, CUDA, target.index)] = tensor.untyped_storage()
            return capsule

        return to_dlpack

    @functools.wraps(take)
    def from_dlpack(capsule):
        name = _name(capsule)
        storage = given.pop(_pointer(capsule, name), None) if name in DEVICE_AT else None
        if storage is None:
            return take(capsule)
        _write(capsule, CPU, 0)
        with machine.untracked():
            plain = take(capsule)
            offset = (plain.data_ptr() - storage.data_ptr()) // plain.element_size()
            return plain.new_empty(0).set_(storage, offset, plain.shape, plain.stride())

    give = giving(_compat.to_dlpack)
    for owner, name in ((_compat.C, "_to_dlpack"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack")):
        patches.replace(owner, name, give)
    patches.replace(_compat.C, "_to_dlpack_versioned", giving(_compat.to_dlpack_versioned))
    patches.replace(_compat.C, "_from_dlpack", from_dlpack)
    _numbers_of_devices(machine, patches)


def _numbers_of_devices(machine: Machine, patches: Patches) -> None:
    """What C++ knows of cuda:1 without a driver."""
    original = _compat.dlpack_device

    def numbers(device):
        gpu: GPU | None = machine.gpu(device) if torch.device(device).type == "cuda" else None
        return original(device) if gpu is None else (CUDA, gpu.index)

    patches.replace(_compat.C, "_torchDeviceToDLDevice", numbers)


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
