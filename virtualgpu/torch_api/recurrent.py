"""The functions behind nn.LSTM, GRU and RNN, and behind LSTMCell and GRUCell: C++ asks where their tensors really are, and takes the CPU's
way; here it is cuDNN's, and CUDA's of the cells."""

import sys
import warnings

import torch
from torch import nn
from torch.backends import cudnn

from virtualgpu import _compat
from virtualgpu.engine import rnn
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.storage import PLAIN_TYPES, gpu_of, is_plain, tensors_of
from virtualgpu.torch_api import autocast
from virtualgpu.torch_api.patches import Patches

MODES = {"rnn_relu": rnn.RELU, "rnn_tanh": rnn.TANH, "lstm": rnn.LSTM, "gru": rnn.GRU}
# The kernel of each, and how many gates it has
CELLS = {
    "lstm_cell": (torch.ops.aten._thnn_fused_lstm_cell.default, 4),
    "gru_cell": (torch.ops.aten._thnn_fused_gru_cell.default, 3),
}
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def install(machine: Machine, patches: Patches) -> None:
    """Replace torch.lstm, gru, rnn_tanh and rnn_relu, and what flatten_parameters asks."""
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
    made = torch.ops.aten._cudnn_rnn.default(input, weights, stride, flat, hx, cx, *settings)
    return made[: 3 if cx is not None else 2]


def _cell(machine: Machine, name: str, original, input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """(hy, cy) of lstm_cell, hy of gru_cell, as aten/src/ATen/native/RNN.cpp makes them of CUDA's kernels. Wrong shapes are the original's to
    refuse."""
    fused, gates = CELLS[name]
    states = hx if name == "lstm_cell" else (hx,)
    if not _is_cell(machine, gates, (input, *states), w_ih, w_hh, b_ih, b_hh):
        return original(input, hx, w_ih, w_hh, b_ih, b_hh)
    with autocast.cast(name, (input, *states, w_ih, w_hh, b_ih, b_hh)) as (input, *states, w_ih, w_hh, b_ih, b_hh):
        products = nn.functional.linear(input, w_ih), nn.functional.linear(states[0], w_hh)
        *made, _ = fused(*products, states[-1], b_ih, b_hh)
    return tuple(made) if name == "lstm_cell" else made[0]


def _is_cell(machine: Machine, gates: int, states, w_ih, w_hh, b_ih, b_hh) -> bool:
    """Are these tensors of one GPU, of the sizes of a cell with so many gates? states: the input [batch, features] and the cell's own
    [batch, hidden]."""
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    tensors = [*states, w_ih, w_hh, *biases]
    if machine.local.bypass or len(biases) == 1 or torch.jit.is_tracing() or not all(map(is_plain, tensors)):
        return False
    input, *own = states
    gpu, hidden = gpu_of(input), w_hh.shape[-1]
    if gpu is None or any(gpu_of(tensor) is not gpu or tensor.dtype not in TYPES for tensor in tensors):
        return False
    if input.dim() != 2 or w_ih.shape != (gates * hidden, input.shape[1]) or w_hh.shape != (gates * hidden, hidden):
        return False
    return all(state.shape == (input.shape[0], hidden) for state in own) and all(
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
