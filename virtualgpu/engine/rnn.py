"""nn.LSTM, GRU, RNN and their cells as a GPU has them: one kernel forward and one backward."""

from collections.abc import Callable
from typing import Any

import torch

from virtualgpu import _compat
from virtualgpu.engine.cuda_checks import LEGACY
from virtualgpu.engine.eager import require_room
from virtualgpu.engine.storage import allocation_of, gpu_of, tensors_of
from virtualgpu.engine.timing import Kernel
from virtualgpu.timing.flops import formula
from virtualgpu.timing.memory_bound import copying

# -- nn.LSTMCell and GRUCell as a GPU has them: two products, and all that follows them is one kernel, and another one backward.
#
# What is kept for the backward pass, and the numbers, as aten/src/ATen/native/cuda/RNN.cu has them: halves are computed in single
# precision. The biases' gradients are sums of their own.

aten = torch.ops.aten


def lstm(gates, hidden_gates, cx, bias=None, hidden_bias=None) -> tuple[torch.Tensor, ...]:
    """(hy, cy, workspace: the gates) of gates [batch, 4 x hidden] and cx [batch, hidden]."""
    i, f, g, o = _added(gates, hidden_gates, bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], dim=1)


def lstm_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias) -> tuple[torch.Tensor, ...]:
    """Gradients of (gates, cx); None of those of hy and cy is zero."""
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy, grad_cy = (torch.zeros_like(cx) if grad is None else grad for grad in (grad_hy, grad_cy))
    squashed = cy.tanh()
    of_cell = grad_hy * o * (1 - squashed * squashed) + grad_cy
    of_i, of_f = of_cell * g * (1 - i) * i, of_cell * cx * (1 - f) * f
    of_g, of_o = of_cell * i * (1 - g * g), grad_hy * squashed * (1 - o) * o
    return torch.cat([of_i, of_f, of_g, of_o], dim=1), of_cell * f


def gru(gates, hidden_gates, hx, bias=None, hidden_bias=None) -> tuple[torch.Tensor, ...]:
    """(hy, workspace) of gates [batch, 3 x hidden] and hx [batch, hidden]; workspace [batch, 5 x hidden]."""
    ir, ii, new = _added(gates, bias).chunk(3, 1)
    hr, hi, hidden_new = _added(hidden_gates, hidden_bias).chunk(3, 1)
    r, i = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    new = (new + r * hidden_new).tanh()
    return new + i * (hx - new), torch.cat([r, i, new, hx, hidden_new], dim=1)


def gru_backward(grad_hy, workspace, has_bias) -> tuple[torch.Tensor, ...]:
    """Gradients of (gates, hidden_gates, hx)."""
    r, i, new, hx, hidden_new = workspace.chunk(5, 1)
    of_new = grad_hy * (1 - i) * (1 - new * new)
    of_r, of_i = of_new * hidden_new * (1 - r) * r, grad_hy * (hx - new) * (1 - i) * i
    return torch.cat([of_r, of_i, of_new], dim=1), torch.cat([of_r, of_i, of_new * r], dim=1), grad_hy * i


def cell(dispatch, func, args, kwargs):
    """`_thnn_fused_lstm_cell` and `_thnn_fused_gru_cell`; NotImplemented for tensors on the CPU."""
    return NotImplemented if gpu_of(args[0]) is None else _run(dispatch, func, args)


def cell_backward(dispatch, func, args, kwargs):
    """`_thnn_fused_lstm_cell_backward_impl` and `_thnn_fused_gru_cell_backward`: gradients also of the biases, None where there are none."""
    workspace, has_bias = args[-2:]
    if gpu_of(workspace) is None:
        return NotImplemented
    if args[0] is None and args[1] is None:  # an LSTM's, of hy and cy
        return None, None, None
    outputs = _run(dispatch, func, args)
    of_gates = outputs[:-1]  # the last is that of the state
    with dispatch:
        of_biases = [grad.sum(0) if has_bias else None for grad in of_gates]
    return *outputs, *of_biases


def _run(dispatch, func, args) -> tuple[torch.Tensor, ...]:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    gpu, dtype = dispatch.machine.own(gpu_of(tensors[0])), tensors[0].dtype
    with dispatch.machine.untracked():
        on_meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
        outputs = FORMULAS[func](*on_meta)
        if not dispatch.machine.dry:
            require_room([tensor.nbytes for tensor in outputs], gpu)
            wider = torch.promote_types(dtype, torch.float32)
            outputs = FORMULAS[func](*(arg.to(wider) if isinstance(arg, torch.Tensor) else arg for arg in args))
            outputs = [tensor.to(dtype) for tensor in outputs]
    dispatch.timing.book(CELL_KERNELS[func], args, tensors, outputs, gpu)
    return tuple(outputs)


def _added(*tensors) -> torch.Tensor:
    first, *more = (tensor for tensor in tensors if tensor is not None)
    for tensor in more:
        first = first + tensor
    return first


FORMULAS: dict[Any, Callable] = {
    aten._thnn_fused_lstm_cell.default: lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_backward,
    aten._thnn_fused_gru_cell.default: gru,
    aten._thnn_fused_gru_cell_backward.default: gru_backward,
}
CELLS = {func: cell if "backward" not in func.name() else cell_backward for func in FORMULAS}
CELL_KERNELS = {func: Kernel(func, None) for func in FORMULAS}


# -- nn.LSTM, GRU and RNN as a GPU has them: all layers and steps are one kernel of cuDNN, and another one backward.
#
# Numbers are those of the CPU's layers, whose scratch memory is no concern of a GPU. The backward pass computes the forward pass
# again, so that nothing of it has to be kept but what cuDNN keeps: its reserve, whose bytes count and whose contents do not. Weights stay
# apart, and are taken as they lie; cuDNN has them in one buffer (flatten_parameters), which rounds their bytes up but once. Weights that have
# left it (deepcopy, a new Parameter, load_state_dict(assign=True)) are copied into another one by each call, as cudnn/RNN.cpp does.


RELU, TANH, LSTM, GRU = range(4)  # cuDNN's numbers of them, cudnnRNNMode_t
LAYERS = {RELU: aten.rnn_relu, TANH: aten.rnn_tanh, LSTM: aten.lstm, GRU: aten.gru}
# From this capability on, cuDNN's recurrent layers take bfloat16 (ATen asks its hooks, supportsBFloat16RNNWithCuDNNv8)
BFLOAT16 = (8, 0)
# How many numbers the reserve holds for each step and hidden unit of a layer, beside the outputs of all layers but the last. NVIDIA
# publishes no formula. Measured on a P100 (github.com/pytorch/pytorch/issues/2895), four layers of 320 units: 736,000,000 bytes for an
# LSTM, 864,000,000 for a GRU. That is 23 to 27, or three outputs in between and, a layer, five (four gates and the cell) and six.
# A plain RNN has its one gate, by analogy. Measured on an H100, cuDNN 9.19, 2026-11-26: these very numbers, and 256 bytes; a bit for each
# number that may be dropped between layers; for two layers of an LSTM of 256 units, projected to 64, 3,456 numbers a step.
KEPT = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}

# What cuDNN works in, at least, for each direction: 16 MiB on an H100 for the smallest layers, and up to 46 for one of 256 units
WORKSPACE = 16 << 20


APART = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted at every call, possibly "
    "greatly increasing memory usage. To compact weights again call flatten_parameters()."
)


def flatten(weights) -> None:
    """These weights of GPUs are in one buffer from now on."""
    chunk = object()
    for place, weight in enumerate(weights):
        allocation_of(weight).chunk = chunk, place


def are_flat(weights) -> bool:
    """Are they still in one buffer, in this order?"""
    chunks = [getattr(allocation_of(weight), "chunk", None) or (None, None) for weight in weights]
    return chunks[0][0] is not None and chunks == [(chunks[0][0], place) for place in range(len(chunks))]


def on_cudnn(dtype: torch.dtype, gpu) -> bool:
    """Is cuDNN on, and does it know this type on this card?"""
    return torch.backends.cudnn.enabled and (dtype is not torch.bfloat16 or gpu.spec.capability >= BFLOAT16)


class Layers:
    """The arguments of `_cudnn_rnn`, but for its tensors: sizes and settings.

    stride: tensors of weights a layer and direction. batch_sizes: of a packed sequence; else empty. seed: [1] int64 on the GPU, of what
    is dropped between layers; None where nothing is.
    """

    def __init__(self, mode, hidden, projected, layers, batch_first, dropout, train, bidirectional, batch_sizes, seed):
        self.mode, self.hidden, self.projected, self.layers = mode, hidden, projected, layers
        self.batch_first, self.train, self.bidirectional = batch_first and not batch_sizes, train, bidirectional
        self.batch_sizes, self.dropout, self.seed = batch_sizes, dropout, seed
        self.directions = 1 + bidirectional
        self.width = self.directions * (projected or hidden)  # of a layer's output

    def reserve_bytes(self, input: torch.Tensor) -> int:
        """For input [steps, batch, features] or, of a packed sequence, [rows, features]."""
        rows = input.shape[:-1].numel()
        inner = self.layers - 1
        saved = KEPT[self.mode] * self.layers * self.directions * self.hidden + inner * self.width
        if self.projected:
            saved = self.layers * self.directions * (6 * self.hidden + 3 * self.projected)
        dropped = rows * inner * self.width // 8 if self.seed is not None else 0
        return rows * saved * input.element_size() + dropped + 256

    def shapes(self, input: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None) -> list[torch.Tensor]:
        """[output, hy, cy] without numbers."""
        size = list(input.shape[:-1])
        if self.batch_first:
            size[:2] = size[1::-1]
        output = input.new_empty([*size, self.width], device="meta")
        cell = (0,) if cx is None else cx.shape
        outputs = [output, input.new_empty(hx.shape, device="meta"), input.new_empty(cell, device="meta")]
        return [output.transpose_(0, 1), *outputs[1:]] if self.batch_first else outputs

    def run(self, input, weights, stride, hx, cx) -> list[torch.Tensor]:
        """[output, hy, cy] with numbers, by the CPU's layers, one after the other.

        Autograd records: where nothing learns, products take another way, and the last bit may differ.
        """
        biases = stride - bool(self.projected) == 4
        settings = (biases, 1, 0.0, self.train, self.bidirectional)
        draws = None if self.seed is None else torch.Generator().manual_seed(self.seed.item())
        sizes = torch.tensor(self.batch_sizes) if self.batch_sizes else None
        with _compat.with_autograd():
            x, states = input.transpose(0, 1) if self.batch_first else input, []
            for layer in range(self.layers):
                if layer and draws is not None:
                    saved = torch.rand(x.shape, generator=draws) >= self.dropout
                    x = x * saved.to(x.dtype).div_(1 - self.dropout if self.dropout < 1 else 1)
                here = slice(layer * self.directions, (layer + 1) * self.directions)
                own = weights[here.start * stride : here.stop * stride]
                hidden = hx[here] if cx is None else [hx[here], cx[here]]
                if sizes is None:
                    x, *state = LAYERS[self.mode].input(x, hidden, own, *settings, False)
                else:
                    x, *state = LAYERS[self.mode].data(x, sizes, hidden, own, *settings)
                states.append(state)
            hy, *cy = (torch.cat(parts) for parts in zip(*states, strict=True))
            output = x.contiguous()
            return [output.transpose(0, 1) if self.batch_first else output, hy, *(cy or [input.new_empty(0)])]


def rnn(dispatch, func, args, kwargs):
    """`_cudnn_rnn`: (output, hy, cy, reserve, the buffer that weights which lie apart were copied into, or an empty tensor).

    NotImplemented for tensors on the CPU. Raises RuntimeError for tensors on several devices or of several types, and for states that
    are not contiguous.
    """
    input, weights, stride, flat, hx, cx, *rest = args
    gpu = gpu_of(input)
    if gpu is None:
        return NotImplemented
    gpu = dispatch.machine.own(gpu)
    copied = weights if flat is None else []
    _check(input, weights, [tensor for tensor in (hx, cx) if tensor is not None])
    layers = Layers(*rest)
    with dispatch.machine.untracked():
        shapes = layers.shapes(input, hx, cx)
        size = layers.reserve_bytes(input) if layers.train else 0
        outputs = shapes
        if not dispatch.machine.dry:
            require_room([*(shape.nbytes for shape in shapes), size], gpu)
            outputs = [tensor.detach() for tensor in layers.run(input, weights, stride, hx, cx)]
        buffer = outputs[0].new_empty(sum(weight.numel() for weight in copied))
        outputs += [outputs[0].new_empty(size, dtype=torch.uint8), buffer]
    for weight in copied:
        dispatch.clock.launch(gpu.index, copying(gpu.kernels, weight), "copy_")
    gpu.lend([WORKSPACE * layers.directions, *([buffer.nbytes] if copied else [])])
    inputs = tensors_of((input, weights, hx, cx), {})
    dispatch.timing.book(RNN_KERNELS[func], args, inputs, outputs, gpu)
    return tuple(outputs)


def rnn_backward(dispatch, func, args, kwargs):
    """`_cudnn_rnn_backward`: (gradients of input, hx, cx, [of each weight]), None for those that nobody asked for.

    NotImplemented for tensors on the CPU. Raises RuntimeError, as PyTorch does, where the forward pass was one of evaluation.
    """
    input, weights, stride, _, hx, cx, _, *grads = args[:10]
    layers, wanted = Layers(*args[10:20]), args[21]
    gpu = gpu_of(input)
    if gpu is None:
        return NotImplemented
    gpu = dispatch.machine.own(gpu)
    if not layers.train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    of = [[input], [hx], [] if cx is None else [cx], weights]
    leaves = [tensor for tensors, asked in zip(of, wanted, strict=True) if asked for tensor in tensors]
    with dispatch.machine.untracked():
        if dispatch.machine.dry:
            outputs = [leaf.new_empty(leaf.shape, device="meta") for leaf in leaves]
        else:
            require_room([leaf.nbytes for leaf in leaves], gpu)
            outputs = _differentiate(layers, input, weights, stride, hx, cx, grads, leaves)
        if wanted[0] and layers.batch_first:  # cuDNN's own is by time (cudnn/RNN.cpp)
            outputs[0] = outputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    gpu.lend([WORKSPACE * layers.directions])
    dispatch.timing.book(RNN_KERNELS[func], args, tensors_of((*args[:10], args[20]), {}), outputs, gpu)
    outputs = iter(outputs)
    dx, dhx, dcx, dweights = ([next(outputs) for _ in of[index]] if wanted[index] else [] for index in range(4))
    return *(grads_of[0] if grads_of else None for grads_of in (dx, dhx, dcx)), dweights


def _differentiate(layers: Layers, input, weights, stride, hx, cx, grads, leaves) -> list[torch.Tensor]:
    """The gradients of `leaves`, from those of output, hy and cy; None among these is zero."""
    with torch.enable_grad():
        own = {id(leaf): leaf.detach().requires_grad_() for leaf in leaves}
        own |= {
            id(tensor): tensor.detach()
            for tensor in (input, hx, cx, *weights)
            if tensor is not None and id(tensor) not in own
        }
        args = own[id(input)], [own[id(weight)] for weight in weights], stride, own[id(hx)], own.get(id(cx))
        pairs = [pair for pair in zip(layers.run(*args), grads, strict=True) if pair[1] is not None]
        outs, grad_outs = zip(*pairs, strict=True)
        result = torch.autograd.grad(outs, [own[id(leaf)] for leaf in leaves], grad_outs, allow_unused=True)
    return [
        leaf.new_zeros(leaf.shape) if grad is None else grad.contiguous()
        for leaf, grad in zip(leaves, result, strict=True)
    ]


def _check(input, weights, hidden) -> None:
    """In the words of aten/src/ATen/native/RNN.h and cudnn/RNN.cpp."""
    for name, state in zip(("hx", "cx"), hidden, strict=False):
        if not state.is_contiguous():
            raise RuntimeError(f"rnn: {name} is not contiguous")
    for name, tensors in (("parameter", weights), ("hidden", hidden)):
        for tensor in tensors:
            if gpu_of(tensor) is not gpu_of(input):
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input tensor at {input.device} and {name} tensor at "
                    f"{tensor.device}"
                )
            if tensor.dtype != input.dtype:
                kinds = [LEGACY[kind.dtype].removesuffix("Tensor") for kind in (input, tensor)]
                raise RuntimeError(
                    f"Input and {name} tensors are not the same dtype, found input tensor with {kinds[0]} and {name} tensor with {kinds[1]}"
                )


RNNS = {
    aten._cudnn_rnn.default: rnn,
    aten._cudnn_rnn_backward.default: rnn_backward,
}
RNN_KERNELS = {func: Kernel(func, formula(func)) for func in RNNS}
