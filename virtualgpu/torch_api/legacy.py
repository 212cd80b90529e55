"""torch.cuda.FloatTensor and its kind: constructors, and the types that isinstance asks for."""

import torch

from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.scalar_types import LEGACY
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Add the types of torch.cuda; replace those of torch, and set_default_tensor_type."""
    plain_types = {}
    for dtype, name in LEGACY.items():
        plain = plain_types[f"torch.{name}"] = getattr(torch, name)
        shared = {"machine": machine, "plain": plain, "dtype": dtype}
        patches.add(torch.cuda, name, OnGPU(name, (), shared | {"__module__": "torch.cuda", "is_cuda": True}))
        on_cpu = {"__module__": "torch", "is_cuda": False, "layout": torch.strided}
        patches.replace(torch, name, OnCPU(name, (), shared | on_cpu))
    patches.stand_in(torch, "set_default_tensor_type", _set_default, plain_types)


def _set_default(plain_types: dict[str, type], original, t) -> None:
    """torch.cuda.FloatTensor: new tensors are float32, and on the GPU."""
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    if not name.startswith("torch.cuda."):
        torch.set_default_device(None)
        original(plain_types.get(name, t))
        return
    kind = name.rpartition(".")[2]
    torch.set_default_dtype(next(dtype for dtype, other in LEGACY.items() if other == kind))
    torch.set_default_device("cuda")


class OnCPU(type):
    """torch.FloatTensor itself takes every tensor here for its own, and none that has no values (torchvision's ToTensor asks it)."""

    def __instancecheck__(cls, instance) -> bool:
        if cls.machine.dry and isinstance(instance, torch.Tensor):
            return (instance.dtype, instance.device.type, instance.layout) == (cls.dtype, "cpu", torch.strided)
        return isinstance(instance, cls.plain) and gpu_of(instance) is None

    def __call__(cls, *args, **kwargs):
        """As PyTorch's."""
        return cls.plain(*args, **kwargs)


class OnGPU(type):
    """torch.cuda.FloatTensor."""

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.dtype and gpu_of(instance) is not None

    def __call__(cls, *args, device=None):
        """FloatTensor(2, 3): of that size, uninitialized; FloatTensor([1, 2]): of those values."""
        gpu = cls.machine.gpu("cuda" if device is None else device)
        with cls.machine.untracked():
            made = cls.plain(*args)
        return made.to(gpu.device)
