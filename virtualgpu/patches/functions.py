"""Functions of torch that ask C++ where a tensor is before they come to the dispatch mode, and would be told: on the CPU."""

import functools

import torch
from torch.nn import functional
from torch.utils import _device

from virtualgpu import _compat
from virtualgpu.engine.eager import require_room
from virtualgpu.engine.home import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.patches.registry import Patches


def install(machine: Machine, patches: Patches) -> None:
    _device._device_constructors()  # torch.set_default_device remembers PyTorch's own functions, not those here
    makers = {"tensor": _tensor, "as_tensor": _as_tensor, "asarray": _asarray, "ctc_loss": _ctc_loss}
    for name, make in makers.items():
        ours = make(machine, getattr(torch, name))
        patches.undo(_compat.register_as_builtin(ours, f"aten::{name}"))
        patches.replace(torch, name, ours)
    ours = _one_hot(machine, functional.one_hot)
    for owner in (functional, torch._C._nn):
        patches.replace(owner, "one_hot", ours)


def _on_gpu(machine: Machine, data) -> bool:
    return isinstance(data, torch.Tensor) and not machine.local.bypass and gpu_of(data) is not None


def _as_tensor(machine: Machine, original):
    """Of a tensor: itself, where neither dtype nor device ask for another."""

    @functools.wraps(original)
    def as_tensor(data, dtype=None, device=None):
        if not _on_gpu(machine, data):
            return original(data, dtype=dtype, device=device)
        device = device if device is not None else _compat.default_device()
        return data.to(data.device if device is None else device, data.dtype if dtype is None else dtype)

    return as_tensor


def _asarray(machine: Machine, original):
    """Of a tensor: the same memory, where nothing asks for another."""

    @functools.wraps(original)
    def asarray(obj, *, dtype=None, device=None, copy=None, requires_grad=False):
        if _on_gpu(machine, obj):
            device = device if device is not None else _compat.default_device()
            if device is not None and machine.gpu(device) is not gpu_of(obj):
                if copy is False:
                    raise ValueError(
                        f"can't alias tensor with device '{obj.device}' in device '{torch.device(device)}'"
                    )
                obj, copy = obj.to(device), None
            device = None
        return original(obj, dtype=dtype, device=device, copy=copy, requires_grad=requires_grad)

    return asarray


def _tensor(machine: Machine, original):
    """Of a tensor: a copy where that is. pin_memory=True pins below the dispatch mode."""

    @functools.wraps(original)
    def tensor(data, *args, device=None, pin_memory=False, **kwargs):
        if device is None and _on_gpu(machine, data) and _compat.default_device() is None:
            device = data.device
        made = original(data, *args, device=device, **kwargs)
        return made.pin_memory() if pin_memory else made

    return tensor


def _ctc_loss(machine: Machine, original):
    """Lengths in tensors: PyTorch reads them on the host, but not where a mode is on; then it would divide by them."""

    @functools.wraps(original)
    def ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
        if _on_gpu(machine, log_probs):
            lengths = input_lengths, target_lengths
            input_lengths, target_lengths = (n.tolist() if isinstance(n, torch.Tensor) else n for n in lengths)
        return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)

    return ctc_loss


def _one_hot(machine: Machine, original):
    """C++ makes its canvas without saying where: room is asked for here."""

    @functools.wraps(original)
    def one_hot(tensor, num_classes=-1):
        if num_classes > 0 and not machine.dry and _on_gpu(machine, tensor):
            require_room([tensor.numel() * num_classes * tensor.element_size()], gpu_of(tensor))
        return original(tensor, num_classes)

    return one_hot
