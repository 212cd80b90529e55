"""nn.LSTMCell and GRUCell as a GPU has them: two products, and all that follows them is one kernel, and another one backward.

What is kept for the backward pass, and the numbers, as aten/src/ATen/native/cuda/RNN.cu has them: halves are computed in single
precision. The biases' gradients are sums of their own.
"""

import torch

from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.eager import require_room
from virtualgpu.engine.timing import Kernel

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


def forward(dispatch, func, args, kwargs):
    """`_thnn_fused_lstm_cell` and `_thnn_fused_gru_cell`; NotImplemented for tensors on the CPU."""
    return NotImplemented if gpu_of(args[0]) is None else _run(dispatch, func, args)


def backward(dispatch, func, args, kwargs):
    """`_thnn_fused_lstm_cell_backward_impl` and `_thnn_fused_gru_cell_backward`: gradients also of the biases, None where there are none."""
    workspace, has_bias = args[-2:]
    if gpu_of(workspace) is None:
        return NotImplemented
    if args[0] is None and args[1] is None:  # an LSTM's, of hy and cy
        return None, None, None
    made = _run(dispatch, func, args)
    of_gates = made[:-1]  # the last is that of the state
    with dispatch:
        of_biases = [grad.sum(0) if has_bias else None for grad in of_gates]
    return *made, *of_biases


def _run(dispatch, func, args) -> tuple[torch.Tensor, ...]:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    gpu, dtype = dispatch.machine.own(gpu_of(tensors[0])), tensors[0].dtype
    with dispatch.machine.untracked():
        on_meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
        made = FORMULAS[func](*on_meta)
        if not dispatch.machine.dry:
            require_room([tensor.nbytes for tensor in made], gpu)
            wider = torch.promote_types(dtype, torch.float32)
            made = FORMULAS[func](*(arg.to(wider) if isinstance(arg, torch.Tensor) else arg for arg in args))
            made = [tensor.to(dtype) for tensor in made]
    dispatch.timing.book(KERNELS[func], args, tensors, made, gpu)
    return tuple(made)


def _added(*tensors) -> torch.Tensor:
    first, *more = (tensor for tensor in tensors if tensor is not None)
    for tensor in more:
        first = first + tensor
    return first


FORMULAS = {
    aten._thnn_fused_lstm_cell.default: lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_backward,
    aten._thnn_fused_gru_cell.default: gru,
    aten._thnn_fused_gru_cell_backward.default: gru_backward,
}
OPERATIONS = {func: forward if "backward" not in func.name() else backward for func in FORMULAS}
KERNELS = {func: Kernel(func, None) for func in FORMULAS}
