"""torch.cuda.FloatTensor and its kind: constructors, and the types that isinstance asks for."""

import torch

from virtualgpu.engine.home import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.operations import LEGACY
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    for dtype, name in LEGACY.items():
        patches.add(torch.cuda, name, _legacy_type(machine, dtype, name))
    original = torch.set_default_tensor_type

    def set_default_tensor_type(t) -> None:
        """torch.cuda.FloatTensor: new tensors are float32, and on the GPU."""
        name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
        if not name.startswith("torch.cuda."):
            torch.set_default_device(None)
            original(t)
            return
        torch.set_default_dtype(next(dtype for dtype, kind in LEGACY.items() if kind == name.rpartition(".")[2]))
        torch.set_default_device("cuda")

    patches.replace(torch, "set_default_tensor_type", set_default_tensor_type)


def _legacy_type(machine: Machine, dtype: torch.dtype, name: str) -> type:
    class Kind(type):
        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, torch.Tensor) and instance.dtype is dtype and gpu_of(instance) is not None

        def __call__(cls, *args, device=None):
            """FloatTensor(2, 3): of that size, uninitialized; FloatTensor([1, 2]): of those values."""
            gpu = machine.gpu("cuda" if device is None else device)
            with machine.untracked():
                made = getattr(torch, name)(*args)
            return made.to(gpu.device)

    return Kind(name, (), {"__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})
