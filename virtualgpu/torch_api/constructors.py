"""torch.tensor, as_tensor and asarray: tensors of the program's numbers, which C++ reads, and of other tensors, about whose place it would be
told: on the CPU."""

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.on_meta import put_on_meta
from virtualgpu.engine.scalar_types import LEGACY
from virtualgpu.errors import on_real_gpu
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    """Replace the three."""
    _compat.device_constructors()  # torch.set_default_device remembers PyTorch's own functions, not those here
    for name, function in {"tensor": _tensor, "as_tensor": _as_tensor, "asarray": _asarray}.items():
        patches.stand_in_builtin((torch,), name, function, machine)


def is_on_gpu(machine: Machine, data) -> bool:
    """Raises RuntimeError for a tensor of a real GPU."""
    if not isinstance(data, torch.Tensor) or machine.local.bypass:
        return False
    if machine.is_on_real_gpu(data):
        raise on_real_gpu(_compat.real_device(data))
    return gpu_of(data) is not None


def _with_numbers(machine: Machine, data):
    """In a dry run C++ cannot look into a list of tensors: in place of each, one with the number that it reads there."""
    if not isinstance(data, (list, tuple)) or not machine.dry or machine.local.bypass:
        return data
    return [(_number if isinstance(item, torch.Tensor) else _with_numbers)(machine, item) for item in data]


def _number(machine: Machine, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() != 1 or not _compat.is_really_meta(tensor):
        return tensor
    number = tensor.item()
    with machine.untracked():
        return torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu")


def _as_tensor(machine: Machine, original, data, dtype=None, device=None):
    """Of a tensor: itself, where neither dtype nor device ask for another."""
    data = _with_numbers(machine, data)
    if not is_on_gpu(machine, data):
        return _marked(machine, original(data, dtype=dtype, device=device), device)
    device = device if device is not None else _compat.default_device()
    return data.to(data.device if device is None else device, data.dtype if dtype is None else dtype)


def _asarray(machine: Machine, original, obj, *, dtype=None, device=None, copy=None, requires_grad=False):
    """Of a tensor: the same memory, where nothing asks for another."""
    if is_on_gpu(machine, obj):
        device = device if device is not None else _compat.default_device()
        if device is not None and machine.gpu(device) is not gpu_of(obj):
            if copy is False:
                raise ValueError(f"can't alias tensor from device '{obj.device}' to '{torch.device(device)}'.")
            obj, copy = obj.to(device), None
        device = None
        if dtype is not None and dtype is not obj.dtype:
            if copy is False:
                kinds = [LEGACY.get(kind, str(kind)).removesuffix("Tensor") for kind in (obj.dtype, dtype)]
                raise ValueError(f"can't alias tensor with dtype '{kinds[0]}' into dtype '{kinds[1]}'.")
            obj, copy = obj.to(dtype), None
        dtype = None
    obj = _with_numbers(machine, obj)
    options = {"dtype": dtype, "copy": copy, "requires_grad": requires_grad}
    if machine.dry and isinstance(obj, torch.UntypedStorage):  # safetensors: a file's, which keeps its numbers
        with machine.untracked():
            made = original(obj, **options)
        return made if device is None else made.to(device)
    return _marked(machine, original(obj, device=device, **options), device)


def _tensor(machine: Machine, original, data, *args, device=None, pin_memory=False, **kwargs):
    """Of a tensor: a copy where that is. pin_memory=True pins below the dispatch mode."""
    if device is None and is_on_gpu(machine, data) and _compat.default_device() is None:
        device = data.device
    data = _with_numbers(machine, data)
    made = _marked(machine, original(data, *args, device=device, **kwargs), device)
    return made.pin_memory() if pin_memory else made


def _marked(machine: Machine, made: torch.Tensor, device) -> torch.Tensor:
    """Where the program has asked for meta in a dry run: C++ copies it there, and dispatch cannot tell that from copies of its own."""
    device = device if device is not None else _compat.default_device()
    asked = device is not None and torch.device(device).type == "meta"
    return put_on_meta(made) if asked and machine.dry else made
