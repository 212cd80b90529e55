# ruff: noqa: F403, F405
"""nn.LSTM, GRU and RNN are one kernel of cuDNN a GPU, nn.LSTMCell and GRUCell two products and one kernel: numbers, memory, refusals."""

import copy
import io
import warnings

import pytest
from torch.utils.checkpoint import checkpoint

from tests.virtualgpu.engine.tools import *
from virtualgpu.engine.rnn import BFLOAT16, WORKSPACE

SETTINGS = {
    "two layers": {"num_layers": 2},
    "both directions, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no biases, float64": {"bias": False, "dtype": DOUBLE},
}
LAYERS = [(kind, name, options) for kind in (nn.LSTM, nn.GRU, nn.RNN) for name, options in SETTINGS.items()]
LAYERS += [(nn.LSTM, "projected", {"num_layers": 2, "proj_size": 3, "bidirectional": True})]
LAYERS += [(nn.RNN, "relu", {"num_layers": 2, "nonlinearity": "relu"})]


def step(kind, options, device) -> list:
    """The output, the states, the gradients of the input, of the first states and of each weight."""
    torch.manual_seed(0)
    layer, dtype = kind(8, 4, **options), options.get("dtype", SINGLE)
    count, batch = layer.num_layers * (1 + layer.bidirectional), 5 if layer.batch_first else 3
    sizes = (layer.proj_size or 4, 4)[: 2 if kind is nn.LSTM else 1]
    x = torch.randn(5, 3, 8, dtype=dtype).to(device).requires_grad_()
    states = [torch.randn(count, batch, size, dtype=dtype).to(device).requires_grad_() for size in sizes]
    layer = layer.to(device)
    out, last = layer(x, tuple(states) if kind is nn.LSTM else states[0])
    last = list(last) if kind is nn.LSTM else [last]
    (out.sin().sum() + last[-1].square().sum()).backward()  # of an LSTM's two, one has no gradient
    return [out, *last, x.grad, *(state.grad for state in states), *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize("kind, name, options", LAYERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_numbers_are_the_cpus_and_a_dry_run_has_the_same_bytes_and_seconds(kind, name, options):
    with virtualgpu.gpus(1):
        found = step(kind, options, "cuda")
        assert all(tensor.is_cuda for tensor in found)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(step(kind, options, "cpu"), found, strict=True))
    same_when_dry(lambda: step(kind, options, "cuda"))


def kernels(function) -> list[str]:
    with virtualgpu.recording() as spans:
        function()
    return [span.name for span in spans]


@pytest.mark.parametrize(("kind", "reserve"), [(nn.LSTM, 736_000_000), (nn.GRU, 864_000_000)])
def test_what_is_kept_for_the_backward_pass(kind, reserve):
    """Measured on a P100 (github.com/pytorch/pytorch/issues/2895): the numbers of weights and bytes that were printed. The layers
    follow from the first; 25,000 rows are the one round number that gives both of the others. 256 bytes more: an H100, 2026-11-26."""
    with virtualgpu.dry_run(1, like="P100"):
        layer, last = kind(123, 320, num_layers=4).cuda(), nn.Linear(320, 10)
        weights = sum(weight.numel() for weight in [*layer.parameters(), *last.parameters()])
        assert weights == {nn.LSTM: 3_038_090, nn.GRU: 2_279_370}[kind]
        x = torch.randn(500, 50, 123, device="cuda")
        with torch.no_grad():
            layer.eval()(x)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        out, last = layer.train()(x)
        states = last if kind is nn.LSTM else [last]
        seen = out.nbytes + 2 * sum(state.nbytes for state in states)  # the last states, and the first, of zeros
        assert torch.cuda.memory_stats()["requested_bytes.all.current"] - before - seen == reserve + 256
        with torch.no_grad():
            assert used(lambda: layer.eval()(x))[1][1] < out.nbytes + MIB + WORKSPACE  # nothing is kept


def test_what_cudnn_refuses(gpus):
    layer, x = nn.LSTM(8, 4).cuda(), torch.randn(5, 3, 8, device="cuda")
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        layer.eval()(x)[0].sum().backward()
    layer.train()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        gradient.sum().backward()
    with torch.backends.cudnn.flags(enabled=False):  # PyTorch's own cells can
        torch.autograd.grad(layer.eval()(x)[0].sum(), x, create_graph=True)
    zeros, options = torch.zeros(1, 3, 4), (layer._flat_weights, True, 1, 0.0, True, False, False)
    for message, call in (
        ("rnn: cx is not contiguous", lambda: layer(x, (zeros.cuda(), torch.zeros(1, 4, 3).cuda().transpose(1, 2)))),
        ("hidden tensors are not at the same device, found input tensor at cuda:0 and", lambda: torch.lstm(x, [zeros] * 2, *options)),
        ("tensors are not the same dtype, found input tensor with Half and parameter", lambda: torch.lstm(x.half(), [zeros.cuda()] * 2, *options)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("run", MODES)
def test_the_gradient_of_a_batch_first_lies_by_time(kind, run):
    """cuDNN's: `.view` of it fails."""
    with run(1, like="H100"):
        net, x = kind(8, 8, batch_first=True, device="cuda"), ones(4, 3, 8, learns=True)
        assert torch.autograd.grad(net(x)[0].sum(), x)[0].stride() == (8, 32, 1)


def test_weights_stay_where_they_are(gpus):
    """Whoever shares their memory (FSDP's gathered parameters) writes to what the next call reads."""
    layer, x = nn.GRU(8, 4).cuda(), torch.randn(5, 3, 8, device="cuda")
    addresses = [weight.data_ptr() for weight in layer.parameters()]
    before, _ = layer(x)
    layer.flatten_parameters()
    assert [weight.data_ptr() for weight in layer.parameters()] == addresses
    with torch.no_grad():
        layer.weight_ih_l0.mul_(2)
    assert not torch.equal(layer(x)[0], before)


def _data(layer):
    layer.weight_ih_l0.data = layer.weight_ih_l0.data.clone()
    return layer


def _again(layer):
    _data(layer).flatten_parameters()
    return layer


def _replaced(layer):  # forward flattens what is new in `_parameters` (RNNBase._update_flat_weights)
    layer.weight_hh_l0 = nn.Parameter(torch.randn_like(layer.weight_hh_l0))
    return layer


def _assigned(layer):
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    return layer


def _loaded(layer):
    torch.save(layer, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


CHANGES = {
    "fresh": (lambda layer: layer, False),
    "moved": (lambda layer: layer.cpu().double().cuda().float(), False),
    "flattened again": (_again, False),
    "replaced": (_replaced, False),
    "assigned": (_assigned, False),
    "loaded whole": (_loaded, False),
    "data": (_data, True),
    "deepcopy": (copy.deepcopy, True),
}


@pytest.mark.parametrize(
    "name, dry", [(name, dry) for name in CHANGES for dry in (False, True) if (name, dry) != ("loaded whole", True)]
)
def test_weights_that_lie_apart_are_copied_together_by_each_call(gpus, name, dry):
    change, apart = CHANGES[name]
    with perhaps_dry(dry), warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        layer, x = change(nn.LSTM(64, 64).cuda()), torch.zeros(3, 2, 64, device="cuda")
        seen.clear()
        layer(x)
        extra = used(lambda: layer(x))[1][1] - WORKSPACE
        weights = sum(weight.nbytes for weight in layer.parameters())
    said = [warning for warning in seen if "contiguous chunk" in str(warning.message)]
    assert len(said) == 2 * apart and (extra >= weights) == apart


def test_where_it_is_not_cudnns(gpus):
    """cuDNN off, a type that the card's does not know, and tensors of the CPU."""
    x = torch.randn(5, 3, 8)
    rnn = [name for name in kernels(lambda: step(nn.GRU, SETTINGS["two layers"], "cuda")) if "rnn" in name]
    assert rnn == ["_cudnn_rnn", "_cudnn_rnn_backward"]  # one kernel each way
    with torch.backends.cudnn.flags(enabled=False):
        assert "_cudnn_rnn" not in kernels(lambda: nn.GRU(8, 4).cuda()(x.cuda()))
    assert BFLOAT16 > (7, 5)  # a T4's
    assert "_cudnn_rnn" not in kernels(lambda: nn.GRU(8, 4).cuda().bfloat16()(x.cuda().bfloat16()))
    assert kernels(lambda: nn.GRU(8, 4)(x)) == []


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(4, 4, num_layers=3, dropout=0.5, dtype=DOUBLE)

    def forward(self, x):
        return self.layers(x)[0]


def test_dropout_between_layers(gpus):
    """Drawn from the GPU's generator; the backward pass drops what the forward pass dropped."""
    torch.manual_seed(0)
    tower, x = Tower().cuda(), rand(5, 3, 4, dtype=DOUBLE)

    def loss(x):
        torch.cuda.manual_seed(1)
        return tower(x).sin().sum()

    state = torch.cuda.get_rng_state()
    first = loss(x)
    assert not torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(first, loss(x)) and not torch.equal(first, tower(x).sin().sum())
    (gradient,) = torch.autograd.grad(first, x)
    direction = torch.randn_like(x)
    with torch.no_grad():
        slope = (loss(x + 1e-5 * direction) - loss(x - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-8)
    torch.cuda.manual_seed(1)
    again = checkpoint(tower, x, use_reentrant=False).sin().sum()
    assert torch.equal(torch.autograd.grad(again, x)[0], gradient)
    with torch.autograd.graph.save_on_cpu():
        again = loss(x)
    assert torch.equal(torch.autograd.grad(again, x)[0], gradient)
    tower.eval()
    assert torch.equal(tower(x), tower(x))


def test_products_in_tf32():
    def seconds():
        with virtualgpu.dry_run(1, like="A100", clock="datasheet", host="launch"):
            layer, x = nn.LSTM(1024, 1024, device="cuda"), rand(50, 256, 1024, learns=False)
            before = figures()[2]
            layer(x)
            return figures()[2] - before

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        slow = seconds()
        assert slow == pytest.approx(2 * 50 * 256 * 2048 * 4096 / 19.5e12, rel=0.02)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert seconds() < slow / 4


def test_torchscript_takes_the_cells_of_cpp(gpus):
    """Scripted and traced layers are C++'s from end to end: the same numbers."""
    torch.manual_seed(0)
    tower, x = Tower().cuda().eval(), rand(5, 3, 4, dtype=DOUBLE, learns=False)
    assert torch.equal(torch.jit.script(tower)(x), tower(x))
    traced = torch.jit.trace(tower, (x,))
    assert torch.equal(traced(x), tower(x)) and "aten::lstm" in str(traced.inlined_graph)


# -- cells

CELLS = [nn.LSTMCell, nn.GRUCell]
TOLERANCE = {DOUBLE: 1e-14, SINGLE: 1e-5, HALF: 1e-2}


def call(cell, x, state):
    """hy. An LSTM's cell begins as its state does."""
    return cell(x, state) if cell.weight_hh.shape[0] == 3 * cell.weight_hh.shape[1] else cell(x, (state, state))[0]


def step_of_cell(kind, device, dtype=SINGLE, bias=True) -> list:
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
def test_numbers_of_cells_are_near_the_cpus_in_one_kernel_each_way(kind, dtype, bias):
    expected, near = step_of_cell(kind, "cpu", dtype, bias), TOLERANCE[dtype]
    with virtualgpu.gpus(1), virtualgpu.recording() as spans:
        for a, b in zip(expected, step_of_cell(kind, "cuda", dtype, bias), strict=True):
            torch.testing.assert_close(b.cpu(), a, rtol=near, atol=near)
    same_when_dry(lambda: step_of_cell(kind, "cuda", dtype, bias))
    name, names = kind.__name__.removesuffix("Cell").lower(), [span.name for span in spans]
    backward = f"_thnn_fused_{name}_cell_backward" + ("_impl" if kind is nn.LSTMCell else "")
    assert [n for n in names if "fused" in n] == [f"_thnn_fused_{name}_cell"] * 5 + [backward] * 5
    assert not {*names} & {"sigmoid", "sigmoid_", "tanh", "addmm"}


@pytest.mark.parametrize("kind, kept", [(nn.LSTMCell, 4 + 4 + 4 + 1 + 1), (nn.GRUCell, 3 + 3 + 5 + 1)])
def test_what_cells_keep_for_the_backward_pass(gpus, kind, kept):
    """Both products, the workspace and the new states, [batch, hidden] each so many times: RNN.cu's, and derivatives.yaml's."""
    with torch.device("cuda"):
        cell, x, state = kind(64, 64), torch.randn(256, 64), torch.randn(256, 64)
    call(cell, x, state)  # what asks for workspaces of products
    out, [held, _] = used(lambda: call(cell, x, state))
    assert held == kept * out.nbytes


@pytest.mark.parametrize("kind", CELLS)
def test_derivatives_of_derivatives_and_what_is_not_cudas_kernel(gpus, kind):
    """One row without a batch, autocast, TorchScript are taken apart as before; and what PyTorch refuses, it refuses in its words."""
    cell = kind(3, 2, dtype=DOUBLE).cuda()
    inputs = [rand(2, size, dtype=DOUBLE) for size in (3, 2)]
    assert torch.autograd.gradgradcheck(lambda x, state: call(cell, x, state), inputs)
    cell, x, state = kind(8, 4).cuda(), rand(3, 8, learns=False), rand(3, 4, learns=False)
    expected = call(cell, x, state)
    torch.testing.assert_close(call(cell, x[0], state[0]), expected[0])
    torch.testing.assert_close(call(torch.jit.script(cell), x, state), expected)
    with torch.autocast("cuda", BRAIN):
        assert call(cell, x, state).dtype is BRAIN
    with pytest.raises(RuntimeError, match="inconsistent input_size: got 7 expected 8"):
        call(cell, x[:, 1:], state)
    with pytest.raises(RuntimeError, match="on the same device"):
        call(cell, x.cpu(), state)
