"""torch.cuda.FloatTensor and its kind: constructors, and the types that isinstance asks for."""

import torch

from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.operations import LEGACY_TYPE_NAMES
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Add the types of torch.cuda; replace those of torch, and set_default_tensor_type."""
    plain_types = {}
    for dtype, name in LEGACY_TYPE_NAMES.items():
        plain = plain_types[f"torch.{name}"] = getattr(torch, name)
        patches.add(torch.cuda, name, _legacy_type(machine, dtype, name, plain))
        patches.replace(torch, name, _cpu_type(machine, dtype, name, plain))
    original = torch.set_default_tensor_type

    def set_default_tensor_type(t) -> None:
        """torch.cuda.FloatTensor: new tensors are float32, and on the GPU."""
        name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
        if not name.startswith("torch.cuda."):
            torch.set_default_device(None)
            original(plain_types.get(name, t))
            return
        torch.set_default_dtype(
            next(dtype for dtype, kind in LEGACY_TYPE_NAMES.items() if kind == name.rpartition(".")[2])
        )
        torch.set_default_device("cuda")

    patches.replace(torch, "set_default_tensor_type", set_default_tensor_type)


def _cpu_type(machine: Machine, dtype: torch.dtype, name: str, plain: type) -> type:
    """torch.FloatTensor itself takes every tensor here for its own, and none that has no values (torchvision's ToTensor asks it)."""

    class Kind(type):
        def __instancecheck__(cls, instance) -> bool:
            if machine.dry and isinstance(instance, torch.Tensor):
                return (instance.dtype, instance.device.type, instance.layout) == (dtype, "cpu", torch.strided)
            return isinstance(instance, plain) and gpu_of(instance) is None

        def __call__(cls, *args, **kwargs):
            return plain(*args, **kwargs)

    return Kind(name, (), {"__module__": "torch", "dtype": dtype, "is_cuda": False, "layout": torch.strided})


def _legacy_type(machine: Machine, dtype: torch.dtype, name: str, plain: type) -> type:
    class Kind(type):
        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, torch.Tensor) and instance.dtype is dtype and gpu_of(instance) is not None

        def __call__(cls, *args, device=None):
            """FloatTensor(2, 3): of that size, uninitialized; FloatTensor([1, 2]): of those values."""
            gpu = machine.gpu("cuda" if device is None else device)
            with machine.untracked():
                made = plain(*args)
            return made.to(gpu.device)

    return Kind(name, (), {"__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})
