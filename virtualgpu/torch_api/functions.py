"""Functions of torch that ask C++ where a tensor is before they come to the dispatch mode, and would be told: on the CPU; and those in
which C++ writes numbers of its own, for which a dry run has no memory."""

import contextlib

import torch
from torch.nn import functional

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.on_meta import put_on_meta
from virtualgpu.engine.scalar_types import LEGACY
from virtualgpu.engine.values import know, known_of
from virtualgpu.errors import on_real_gpu
from virtualgpu.torch_api.registry import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.tensor, as_tensor, asarray, ctc_loss, one_hot, linearize, what is behind pad_packed_sequence and SyncBatchNorm, DLPack's
    capsules, and what groups tensors by device for foreach operations."""
    _compat.device_constructors()  # torch.set_default_device remembers PyTorch's own functions, not those here
    for name, function in {
        "tensor": _tensor,
        "as_tensor": _as_tensor,
        "asarray": _asarray,
        "ctc_loss": _ctc_loss,
    }.items():
        patches.stand_in_builtin((torch,), name, function, machine)
    for owner in (functional, _compat.NN):
        patches.stand_in(owner, "one_hot", _one_hot, machine)
    patches.stand_in(_compat.VF, "_pad_packed_sequence", _pad_packed_sequence, machine)
    batch_norm = _compat.SyncBatchNormFunction
    patches.replace(batch_norm, "forward", staticmethod(standing_in(batch_norm.forward, _sync_batch_norm, machine)))
    patches.replace(_compat.C, "_group_tensors_by_device_and_dtype", group_by_device)
    for owner, name in (
        (_compat.C, "_to_dlpack"),
        (_compat.C, "_to_dlpack_versioned"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
        (_compat.C, "_torchDeviceToDLDevice"),
    ):
        patches.stand_in(owner, name, _to_dlpack)
    patches.stand_in(torch.autograd, _compat.MAKE_GRADS, _make_grads)
    linearize = standing_in(torch.func.linearize, _linearize, machine)
    patches.replace_everywhere(torch.func, "linearize", linearize)


def _make_grads(original, outputs, gradients, *args, **kwargs):
    """What backward and grad start from: a gradient lies where its tensor does (validate_outputs in torch/csrc/autograd/engine.cpp)."""
    made = original(outputs, gradients, *args, **kwargs)
    for index, (out, gradient) in enumerate(zip(outputs, gradients, strict=False)):
        plain = type(out) is type(gradient) is torch.Tensor
        if plain and gradient.dim() and out.device != gradient.device:
            raise RuntimeError(
                f"invalid gradient at index {index} - expected device {out.device} but got {gradient.device}"
            )
    return made


def _on_gpu(machine: Machine, data) -> bool:
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
    if not _on_gpu(machine, data):
        return _marked(machine, original(data, dtype=dtype, device=device), device)
    device = device if device is not None else _compat.default_device()
    return data.to(data.device if device is None else device, data.dtype if dtype is None else dtype)


def _asarray(machine: Machine, original, obj, *, dtype=None, device=None, copy=None, requires_grad=False):
    """Of a tensor: the same memory, where nothing asks for another."""
    if _on_gpu(machine, obj):
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
    if device is None and _on_gpu(machine, data) and _compat.default_device() is None:
        device = data.device
    data = _with_numbers(machine, data)
    made = _marked(machine, original(data, *args, device=device, **kwargs), device)
    return made.pin_memory() if pin_memory else made


def _marked(machine: Machine, made: torch.Tensor, device) -> torch.Tensor:
    """Where the program has asked for meta in a dry run: C++ copies it there, and dispatch cannot tell that from copies of its own."""
    device = device if device is not None else _compat.default_device()
    asked = device is not None and torch.device(device).type == "meta"
    return put_on_meta(made) if asked and machine.dry else made


def _ctc_loss(machine: Machine, original, log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """Lengths in tensors: PyTorch reads them on the host, but not where a mode is on; then it would divide by them."""
    if machine.dry or _on_gpu(machine, log_probs):
        input_lengths, target_lengths = map(_read, (input_lengths, target_lengths))
    with machine.local.counted_by_cpp():
        return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _read(lengths):
    if not isinstance(lengths, torch.Tensor):
        return lengths
    if _compat.is_really_meta(lengths) and known_of(lengths) is None:
        raise NotImplementedError(
            "ctc_loss needs as much memory as its lengths say, which this dry run does not know. Give them as numbers"
        )
    return lengths.flatten().tolist()  # without a batch it may be a number


def _one_hot(machine: Machine, original, tensor, num_classes=-1):
    """As for CUDA (aten/src/ATen/native/Onehot.cpp): only who gives no number of classes waits for the GPU to know it."""
    if not _on_gpu(machine, tensor) or tensor.dtype is not torch.int64 or (num_classes < 0 and not tensor.numel()):
        return original(tensor, num_classes)
    if num_classes == -1:
        if _compat.is_really_meta(tensor) and known_of(tensor) is None:
            raise NotImplementedError(
                "one_hot takes the number of classes from values, which this dry run does not know. Give num_classes"
            )
        num_classes = int(tensor.max()) + 1
    if num_classes < 1:
        raise RuntimeError("num_classes should be positive")
    made = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


def _pad_packed_sequence(machine: Machine, original, *args):
    """It tells the lengths, too, which C++ counts."""
    with machine.local.counted_by_cpp():
        return original(*args)


def group_by_device(lists, with_indices=False):
    """What torch.optim asks before it calls foreach operations: {(device, dtype): (lists, indices)}, by each first tensor."""
    groups: dict = {}
    for index, first in enumerate(lists[0]):
        columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for column, values in zip(columns, lists, strict=True):
            if values:
                column.append(values[index])
        if with_indices:
            indices.append(index)
    return groups


def _to_dlpack(original, what, *args, **kwargs):
    """A capsule says to C where numbers lie, or a device its number: on a GPU no library but PyTorch could read it."""
    gpu = gpu_of(what) if isinstance(what, torch.Tensor) else torch.device(what).type == "cuda" or None
    if gpu is not None:
        raise NotImplementedError(
            "DLPack of a GPU's tensors is not modelled on virtual GPUs: hand on tensor.cpu(), and move what comes back"
        )
    return original(what, *args, **kwargs)


def _sync_batch_norm(machine: Machine, original, *args):
    """torch.nn.SyncBatchNorm leaves out ranks that have no rows, by a mask whose values a dry run does not have: there all have some."""
    with _EachHasRows(machine) if machine.dry else contextlib.nullcontext():
        return original(*args)


class _EachHasRows(_compat.TorchDispatchMode):
    """What is compared in here is True."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.ge.Scalar:
            with self.machine.untracked():
                know(out, True)
        return out


def _linearize(machine: Machine, original, *args, **kwargs):
    """It traces what it is given, and folds what does not depend on tangents: in a dry run that would be all."""
    if machine.dry:
        raise NotImplementedError(
            "torch.func.linearize is not modelled in a dry run. Use torch.func.jvp, or run this line outside dry_run()"
        )
    return original(*args, **kwargs)
