"""Functions of torch and nn.functional that ask C++ where a tensor is, and would be told: on the CPU. Here they do what CUDA's do."""

import contextlib
import sys
import warnings

import torch
from torch import nn
from torch.backends import cudnn
from torch.nn import functional

from virtualgpu import _compat
from virtualgpu.engine import cuda_only_ops, rnn
from virtualgpu.engine.cuda_differences import NARROW, WIDE, check_half_fft
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import PLAIN_TYPES, gpu_of, is_plain, tensors_of
from virtualgpu.engine.values import is_known, know
from virtualgpu.torch_api import autocast
from virtualgpu.torch_api.construct import is_on_gpu
from virtualgpu.torch_api.patches import Patches, standing_in


def install(machine: Machine, patches: Patches) -> None:
    """All of this file's stand-ins."""
    _install_functions(machine, patches)
    _install_fft(machine, patches)
    _install_recurrent(machine, patches)


# -- Those that ask before they come to the dispatch mode, or in which C++ writes numbers of its own, for which a dry run has no memory;
# and dropout and RMS norm, which are one kernel on a GPU.


def _install_functions(machine: Machine, patches: Patches) -> None:
    patches.stand_in_builtin((torch, _compat.VF), "dropout", _dropout, machine)
    patches.stand_in_builtin((torch,), "rms_norm", _rms_norm, machine)
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
    patches.replace(_compat.C, "_group_tensors_by_device_and_dtype", _group_by_device)
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
    started = original(outputs, gradients, *args, **kwargs)
    for index, (out, gradient) in enumerate(zip(outputs, gradients, strict=False)):
        plain = type(out) is type(gradient) is torch.Tensor
        if plain and gradient.dim() and out.device != gradient.device:
            raise RuntimeError(
                f"invalid gradient at index {index} - expected device {out.device} but got {gradient.device}"
            )
    return started


def _ctc_loss(machine: Machine, original, log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """Lengths in tensors: PyTorch reads them on the host, but not where a mode is on; then it would divide by them."""
    if machine.dry or is_on_gpu(machine, log_probs):
        input_lengths, target_lengths = map(_numbers, (input_lengths, target_lengths))
    with machine.local.counted_by_cpp():
        return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _numbers(lengths):
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
    out = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


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


def _group_by_device(lists, with_indices=False):
    """What torch.optim asks before it calls foreach operations: {(device, dtype): (lists, indices)}, by each first tensor.

    Raises RuntimeError for a state that is elsewhere than its parameter (aten/src/ATen/native/ForeachUtils.h)."""
    groups: dict = {}
    for index, first in enumerate(lists[0]):
        gpu = gpu_of(first)
        key = first.device if gpu is None else gpu.device, first.dtype
        if key not in groups:
            groups[key] = [[] for _ in lists], []
        columns, indices = groups[key]
        for column, values in zip(columns, lists, strict=True):
            if not values:
                continue
            value = values[index]
            if value is not None and value is not first:
                beside = value.dtype == first.dtype and gpu is not None and gpu_of(value) is gpu
                if not (beside or _may_join(first, value)):
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
    device = value.device
    return (device.type == "cpu" and counts) or (device == first.device and (counts or value.dtype == first.dtype))


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


def _dropout(machine: Machine, original, input, p, train):
    """One kernel, which keeps a mask of one byte an element (is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp);
    the CPU would keep one of the input's type. The numbers are the same."""
    fused = is_plain(input) and not machine.local.bypass and train and 0 < p < 1
    if not fused or input.is_nested or gpu_of(input) is None or not input.numel():
        return original(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def _rms_norm(machine: Machine, original, input, normalized_shape, weight=None, eps=None):
    """One kernel, where a GPU has one."""
    if machine.local.bypass or not cuda_only_ops.is_fused(input, weight):
        return original(input, normalized_shape, weight, eps)
    shape = list(normalized_shape)
    if list(input.shape[-len(shape) :]) != shape or not shape or (weight is not None and list(weight.shape) != shape):
        return original(input, normalized_shape, weight, eps)  # which says so
    with autocast.cast("rms_norm", (input, weight)) as (input, weight):
        return torch.ops.aten._fused_rms_norm.default(input, shape, weight, eps)[0]


# -- torch.fft of float16 with numbers: before it comes to dispatch, C++ asks where the tensor is, and would refuse it as the CPU's.
#
# It is carried out in single precision, and rounded; on a virtual GPU that is three kernels, where cuFFT has one.


OF_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
OF_TWO = tuple(f"{name}2" for name in OF_ONE)
OF_ALL = tuple(f"{name}n" for name in OF_ONE)


def _install_fft(machine: Machine, patches: Patches) -> None:
    for name in (*OF_ONE, *OF_TWO, *OF_ALL):
        value = standing_in(getattr(torch.fft, name), _transform, machine, name)
        patches.undo(_compat.register_as_builtin(value, f"aten::fft_{name}"))
        patches.replace(torch.fft, name, value)


def _transform(machine, name, original, input, *args, **kwargs):
    wide = WIDE.get(input.dtype) if isinstance(input, torch.Tensor) else None
    if wide is None or machine.dry or machine.local.bypass or gpu_of(input) is None or kwargs.get("out") is not None:
        return original(input, *args, **kwargs)
    check_half_fft(_sizes(name, input, *args, **kwargs))
    out = original(input.to(wide), *args, **kwargs)
    return out.to(NARROW[out.dtype])


def _sizes(name: str, input, size=None, dim=None, norm=None, *, n=None, s=None, **kwargs) -> list[int]:
    """Of the signal, along each dimension that is transformed."""
    if name in OF_ONE:
        size = n if size is None else size
        size, dims = None if size is None else [size], [-1 if dim is None else dim]
    else:
        size = s if size is None else size
        count = 2 if name in OF_TWO else input.dim() if size is None else len(size)
        dims = list(dim) if dim is not None else list(range(-count, 0))
    sizes = [input.shape[axis] for axis in dims] if size is None else list(size)
    if size is None and name.startswith(("irfft", "hfft")):
        sizes[-1] = 2 * (sizes[-1] - 1)  # of which a half is given
    return [input.shape[axis] if length == -1 else length for length, axis in zip(sizes, dims, strict=True)]


# -- The functions behind nn.LSTM, GRU and RNN, and behind LSTMCell and GRUCell: C++ would take the CPU's way; here it is cuDNN's, and CUDA's
# of the cells.

MODES = {"rnn_relu": rnn.RELU, "rnn_tanh": rnn.TANH, "lstm": rnn.LSTM, "gru": rnn.GRU}
# The kernel of each, and how many gates it has
CELLS = {
    "lstm_cell": (torch.ops.aten._thnn_fused_lstm_cell.default, 4),
    "gru_cell": (torch.ops.aten._thnn_fused_gru_cell.default, 3),
}
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _install_recurrent(machine: Machine, patches: Patches) -> None:
    patches.replace(cudnn, "is_acceptable", _is_acceptable)
    patches.replace(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.stand_in(torch, "_cudnn_rnn_flatten_weight", _flatten)
    patches.stand_in(nn.RNNBase, "__setstate__", _set_state)
    for name, mode in MODES.items():
        patches.stand_in_builtin((torch, _compat.VF), name, _layers, machine, mode)
    for name in CELLS:
        patches.stand_in_builtin((torch, _compat.VF), name, _cell, machine, name)


def _flatten(original, weights, *args):
    """What flatten_parameters calls, once it knows that cuDNN takes the weights."""
    return rnn.flatten(weights) if all(map(gpu_of, weights)) else original(weights, *args)


def _set_state(original, layers: nn.RNNBase, state) -> None:
    """A file, or a pipe, keeps what weights have in common, their buffer; a deep copy makes one of each."""
    original(layers, state)
    if sys._getframe(2).f_globals.get("__name__") != "copy":
        layers.flatten_parameters()


def _layers(machine: Machine, mode: int, original, *args):
    """As aten/src/ATen/native/cudnn/RNN.cpp hands them to `_cudnn_rnn`."""
    if machine.local.bypass or not _taken_by_cudnn(args):
        return original(*args)
    packed = isinstance(args[3], (list, tuple))
    input, sizes, args = args[0], args[1].tolist() if packed else [], args[2:] if packed else args[1:]
    states, weights, biases, count, dropout, train, bidirectional, *batch_first = args
    hx, cx = states if mode == rnn.LSTM else (states, None)
    hidden = (hx if cx is None else cx).shape[2]
    projected = 0 if hx.shape[2] == hidden else hx.shape[2]
    stride = (4 if biases else 2) + bool(projected)
    seed = None
    if dropout and train and count > 1:
        seed = torch.randint(1 << 62, (1,), device=input.device)
    settings = mode, hidden, projected, count, any(batch_first), dropout, train, bidirectional, sizes, seed
    flat = None
    if rnn.are_flat(weights):
        flat = torch.empty(0, dtype=torch.uint8, device=input.device)  # of a type that autocast leaves alone
    else:
        warnings.warn(rnn.APART, stacklevel=3)
    out = torch.ops.aten._cudnn_rnn.default(input, weights, stride, flat, hx, cx, *settings)
    return out[: 3 if cx is not None else 2]


def _cell(machine: Machine, name: str, original, input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """(hy, cy) of lstm_cell, hy of gru_cell, as aten/src/ATen/native/RNN.cpp makes them of CUDA's kernels. Wrong shapes are the original's to
    refuse."""
    fused, gates = CELLS[name]
    states = hx if name == "lstm_cell" else (hx,)
    if not _is_cell(machine, gates, (input, *states), w_ih, w_hh, b_ih, b_hh):
        return original(input, hx, w_ih, w_hh, b_ih, b_hh)
    with autocast.cast(name, (input, *states, w_ih, w_hh, b_ih, b_hh)) as (input, *states, w_ih, w_hh, b_ih, b_hh):
        products = nn.functional.linear(input, w_ih), nn.functional.linear(states[0], w_hh)
        *out, _ = fused(*products, states[-1], b_ih, b_hh)
    return tuple(out) if name == "lstm_cell" else out[0]


def _is_cell(machine: Machine, gates: int, states, w_ih, w_hh, b_ih, b_hh) -> bool:
    """Are these tensors of one GPU, of the sizes of a cell with so many gates? states: the input [batch, features] and the cell's own
    [batch, hidden]."""
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    tensors = [*states, w_ih, w_hh, *biases]
    if machine.local.bypass or len(biases) == 1 or torch.jit.is_tracing() or not all(map(is_plain, tensors)):
        return False
    input, *hidden_states = states
    gpu, hidden = gpu_of(input), w_hh.shape[-1]
    if gpu is None or any(gpu_of(tensor) is not gpu or tensor.dtype not in TYPES for tensor in tensors):
        return False
    if input.dim() != 2 or w_ih.shape != (gates * hidden, input.shape[1]) or w_hh.shape != (gates * hidden, hidden):
        return False
    return all(state.shape == (input.shape[0], hidden) for state in hidden_states) and all(
        bias.shape == (gates * hidden,) for bias in biases
    )


def _taken_by_cudnn(args) -> bool:
    """Is cuDNN on, and does it know this input (at::cudnn_is_acceptable)? Tracing and wrapped tensors are left to C++."""
    input = args[0]
    if type(input) not in PLAIN_TYPES or (gpu := gpu_of(input)) is None or not rnn.on_cudnn(input.dtype, gpu):
        return False
    if input.dtype not in TYPES or not input.numel() or torch.jit.is_tracing():
        return False
    return all(map(is_plain, tensors_of(args, {})))


def _is_acceptable(tensor: torch.Tensor) -> bool:
    """torch.backends.cudnn.is_acceptable."""
    return cudnn.enabled and tensor.is_cuda and tensor.dtype in cudnn.CUDNN_TENSOR_DTYPES
