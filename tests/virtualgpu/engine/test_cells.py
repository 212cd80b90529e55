"""nn.LSTMCell and GRUCell: two products and one kernel, and what CUDA's keeps of it."""

import pytest
import torch
from torch import nn

import virtualgpu
from tests.virtualgpu.engine.test_recurrent import used

CELLS = [nn.LSTMCell, nn.GRUCell]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 1e-2}


def called(cell, x, state):
    """hy. An LSTM's cell begins as its state does."""
    return cell(x, state) if cell.weight_hh.shape[0] == 3 * cell.weight_hh.shape[1] else cell(x, (state, state))[0]


def step(kind, device, dtype=torch.float32, bias=True) -> list[torch.Tensor]:
    """Five steps: the gradients of the inputs, of the first state and of each weight."""
    torch.manual_seed(0)
    cell = kind(8, 4, bias=bias, dtype=dtype).to(device)
    x = torch.randn(5, 3, 8, dtype=dtype).to(device).requires_grad_()
    first = torch.randn(3, 4, dtype=dtype).to(device).requires_grad_()
    state = (first, first) if kind is nn.LSTMCell else first
    for row in x:
        state = cell(row, state)
    (state[0] if kind is nn.LSTMCell else state).sin().sum().backward()
    return [x.grad, first.grad, *(weight.grad for weight in cell.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", CELLS)
def test_numbers_are_near_the_cpus_and_a_dry_run_has_the_same_bytes_and_seconds(kind, dtype, bias):
    expected = step(kind, "cpu", dtype, bias)
    with virtualgpu.gpus(1):
        result = step(kind, "cuda", dtype, bias)
        figures = used()
        for a, b in zip(expected, result, strict=True):
            torch.testing.assert_close(b.cpu(), a, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    with virtualgpu.dry_run(1):
        result = step(kind, "cuda", dtype, bias)
        assert used() == figures and [tensor.shape for tensor in result] == [tensor.shape for tensor in expected]


@pytest.mark.parametrize("kind", CELLS)
def test_one_kernel_each_way(gpus, kind):
    name = kind.__name__.removesuffix("Cell").lower()
    with virtualgpu.recording() as spans:
        step(kind, "cuda")
    names = [span.name for span in spans if "fused" in span.name]
    of_backward = f"_thnn_fused_{name}_cell_backward" + ("_impl" if kind is nn.LSTMCell else "")
    assert names == [f"_thnn_fused_{name}_cell"] * 5 + [of_backward] * 5
    assert not {span.name for span in spans} & {"sigmoid", "sigmoid_", "tanh", "addmm"}


@pytest.mark.parametrize("kind, kept", [(nn.LSTMCell, 4 + 4 + 4 + 1 + 1), (nn.GRUCell, 3 + 3 + 5 + 1)])
def test_what_is_kept_for_the_backward_pass(gpus, kind, kept):
    """Both products, the workspace and the new states, [batch, hidden] each so many times: RNN.cu's, and derivatives.yaml's."""
    with torch.device("cuda"):
        cell, x, state = kind(64, 64), torch.randn(256, 64), torch.randn(256, 64)
    called(cell, x, state)  # what asks for workspaces of products
    before = torch.cuda.memory_allocated()
    out = called(cell, x, state)
    assert torch.cuda.memory_allocated() - before == kept * out.nbytes


@pytest.mark.parametrize("kind", CELLS)
def test_derivatives_of_derivatives(gpus, kind):
    cell = kind(3, 2, dtype=torch.float64).cuda()
    x, state = (torch.randn(2, size, dtype=torch.float64, device="cuda").requires_grad_() for size in (3, 2))
    assert torch.autograd.gradgradcheck(lambda x, state: called(cell, x, state), (x, state))


@pytest.mark.parametrize("kind", CELLS)
def test_what_is_not_cudas_kernel_is_taken_apart_as_before(gpus, kind):
    """One row without a batch, autocast, TorchScript; and what PyTorch refuses, it refuses in its words."""
    cell, x, state = kind(8, 4).cuda(), torch.randn(3, 8, device="cuda"), torch.randn(3, 4, device="cuda")
    expected = called(cell, x, state)
    torch.testing.assert_close(called(cell, x[0], state[0]), expected[0])
    torch.testing.assert_close(called(torch.jit.script(cell), x, state), expected)
    with torch.autocast("cuda", torch.bfloat16):
        assert called(cell, x, state).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="inconsistent input_size: got 7 expected 8"):
        called(cell, x[:, 1:], state)
    with pytest.raises(RuntimeError, match="on the same device"):
        called(cell, x.cpu(), state)
