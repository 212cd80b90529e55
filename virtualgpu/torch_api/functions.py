"""Functions of torch that ask C++ where a tensor is before they come to the dispatch mode, and would be told: on the CPU; and those in
which C++ writes numbers of its own, for which a dry run has no memory. What makes tensors of the program's numbers: `constructors`."""

import contextlib

import torch
from torch.nn import functional

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.values import is_known, know
from virtualgpu.torch_api.constructors import is_on_gpu
from virtualgpu.torch_api.registry import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """Replace ctc_loss, one_hot, cov, corrcoef, sparse_coo_tensor, linearize, what is behind pad_packed_sequence and SyncBatchNorm, DLPack's
    capsules, and what groups tensors by device for foreach operations."""
    patches.stand_in_builtin((torch,), "ctc_loss", _ctc_loss, machine)
    for owner in (functional, _compat.NN):
        patches.stand_in(owner, "one_hot", _one_hot, machine)
    for name in ("cov", "corrcoef"):
        patches.stand_in_builtin((torch,), name, _cov, machine)
        patches.stand_in(torch.Tensor, name, _cov, machine)
    patches.stand_in_builtin((torch,), "sparse_coo_tensor", _sparse_coo_tensor, machine)
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


def _ctc_loss(machine: Machine, original, log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """Lengths in tensors: PyTorch reads them on the host, but not where a mode is on; then it would divide by them."""
    if machine.dry or is_on_gpu(machine, log_probs):
        input_lengths, target_lengths = map(_read, (input_lengths, target_lengths))
    with machine.local.counted_by_cpp():
        return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _read(lengths):
    if not isinstance(lengths, torch.Tensor):
        return lengths
    if not is_known(lengths):
        raise NotImplementedError(
            "ctc_loss needs as much memory as its lengths say, which this dry run does not know. Give them as numbers"
        )
    return lengths.flatten().tolist()  # without a batch it may be a number


def _one_hot(machine: Machine, original, tensor, num_classes=-1):
    """As for CUDA (aten/src/ATen/native/Onehot.cpp): only who gives no number of classes waits for the GPU to know it."""
    if not is_on_gpu(machine, tensor) or tensor.dtype is not torch.int64 or (num_classes < 0 and not tensor.numel()):
        return original(tensor, num_classes)
    if num_classes == -1:
        if not is_known(tensor):
            raise NotImplementedError(
                "one_hot takes the number of classes from values, which this dry run does not know. Give num_classes"
            )
        num_classes = int(tensor.max()) + 1
    if num_classes < 1:
        raise RuntimeError("num_classes should be positive")
    made = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


def _cov(machine: Machine, original, input, *args, **kwargs):
    """C++ asks whether degrees of freedom are left, of a number that it makes where the input is."""
    out = original(input, *args, **kwargs)
    if is_on_gpu(machine, input):
        machine.clock.wait_for(machine.clock.current(gpu_of(input).index))
    return out


def _sparse_coo_tensor(machine: Machine, original, *args, **kwargs):
    """Without a size C++ copies the largest indices to the host."""
    out = original(*args, **kwargs)
    if len(args) < 3 and kwargs.get("size") is None and is_on_gpu(machine, out):
        machine.clock.wait_for(machine.clock.current(gpu_of(out).index))
    return out


def _pad_packed_sequence(machine: Machine, original, *args):
    """It tells the lengths, too, which C++ counts."""
    with machine.local.counted_by_cpp():
        return original(*args)


def group_by_device(lists, with_indices=False):
    """What torch.optim asks before it calls foreach operations: {(device, dtype): (lists, indices)}, by each first tensor.

    Raises RuntimeError for a state that is elsewhere than its parameter (aten/src/ATen/native/ForeachUtils.h)."""
    groups: dict = {}
    for index, first in enumerate(lists[0]):
        columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for column, values in zip(columns, lists, strict=True):
            if values:
                value = values[index]
                if value is not None and value is not first and not _may_join(first, value):
                    raise RuntimeError(
                        "Tensors of the same index must be on the same device and the same dtype except `step` tensors that can be "
                        "CPU and float32/64 notwithstanding"
                    )
                column.append(value)
        if with_indices:
            indices.append(index)
    return groups


def _may_join(first: torch.Tensor, value: torch.Tensor) -> bool:
    counts = value.dtype in (torch.float32, torch.float64)  # a count of steps is so, whatever the parameter's type
    place = value.device
    return (place.type == "cpu" and counts) or (place == first.device and (counts or value.dtype == first.dtype))


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
