"""nn.LSTM, GRU and RNN are one kernel of cuDNN a GPU: the CPU's numbers, cuDNN's memory, and what cuDNN refuses."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import virtualgpu
from virtualgpu.engine.rnn import BFLOAT16, WORKSPACE

SETTINGS = {
    "two layers": {"num_layers": 2},
    "both directions, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no biases, float64": {"bias": False, "dtype": torch.float64},
}
LAYERS = {
    f"{kind.__name__}, {name}": (kind, options)
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for name, options in SETTINGS.items()
}
LAYERS["LSTM, projected"] = (nn.LSTM, {"num_layers": 2, "proj_size": 3, "bidirectional": True})
LAYERS["RNN, relu"] = (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"})
MIB = 1 << 20


def step(kind, options, device):
    """The output, the states, the gradients of the input, of the first states and of each weight; and the layer."""
    torch.manual_seed(0)
    layer, dtype = kind(8, 4, **options), options.get("dtype", torch.float32)
    rows = layer.num_layers * (1 + layer.bidirectional)
    batch = 5 if layer.batch_first else 3
    x = torch.randn(5, 3, 8, dtype=dtype).to(device).requires_grad_()
    states = [
        torch.randn(rows, batch, size, dtype=dtype) for size in (layer.proj_size or 4, 4)[: 2 if kind is nn.LSTM else 1]
    ]
    layer, states = layer.to(device), [state.to(device).requires_grad_() for state in states]
    out, last = layer(x, tuple(states) if kind is nn.LSTM else states[0])
    last = list(last) if kind is nn.LSTM else [last]
    (
        out.sin().sum() + sum(state.square().sum() for state in last[-1:])
    ).backward()  # of an LSTM's two, one has no gradient
    return [
        out,
        *last,
        x.grad,
        *(state.grad for state in states),
        *(weight.grad for weight in layer.parameters()),
    ], layer


def used() -> tuple:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), virtualgpu.machine().clock.host


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_are_the_cpus_and_a_dry_run_has_the_same_bytes_and_seconds(name):
    expected, _ = step(*LAYERS[name], "cpu")
    with virtualgpu.gpus(1):
        found, _layer = step(*LAYERS[name], "cuda")
        figures = used(), [(tensor.shape, tensor.stride()) for tensor in found]
        assert all(tensor.is_cuda for tensor in found)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))
    with virtualgpu.dry_run(1):
        found, _layer = step(*LAYERS[name], "cuda")
        assert (used(), [(tensor.shape, tensor.stride()) for tensor in found]) == figures


def test_one_kernel_each_way(gpus):
    with virtualgpu.recording() as spans:
        step(nn.GRU, SETTINGS["both directions, batch first"], "cuda")
    names = [span.name for span in spans if "rnn" in span.name]
    assert names == ["_cudnn_rnn", "_cudnn_rnn_backward"]


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
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer.eval()(x)
            assert torch.cuda.max_memory_allocated() - before < out.nbytes + MIB + WORKSPACE  # nothing is kept


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
        (gradient,) = torch.autograd.grad(layer.eval()(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rnn: cx is not contiguous"):
        layer(x, (torch.zeros(1, 3, 4, device="cuda"), torch.zeros(1, 4, 3, device="cuda").transpose(1, 2)))
    with pytest.raises(
        RuntimeError, match="Input and hidden tensors are not at the same device, found input tensor at cuda:0 and"
    ):
        torch.lstm(x, [torch.zeros(1, 3, 4)] * 2, layer._flat_weights, True, 1, 0.0, True, False, False)
    states = [torch.zeros(1, 3, 4, device="cuda")] * 2
    with pytest.raises(
        RuntimeError, match="parameter tensors are not the same dtype, found input tensor with Half and parameter"
    ):
        torch.lstm(x.half(), states, layer._flat_weights, True, 1, 0.0, True, False, False)


def test_weights_stay_where_they_are(gpus):
    """Whoever shares their memory (FSDP's gathered parameters) writes to what the next call reads."""
    layer, x = nn.GRU(8, 4).cuda(), torch.randn(5, 3, 8, device="cuda")
    places = [weight.data_ptr() for weight in layer.parameters()]
    before, _ = layer(x)
    layer.flatten_parameters()
    assert [weight.data_ptr() for weight in layer.parameters()] == places
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
    file = io.BytesIO()
    torch.save(layer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


APART = {
    "fresh": (lambda layer: layer, False),
    "moved": (lambda layer: layer.cpu().double().cuda().float(), False),
    "flattened again": (_again, False),
    "replaced": (_replaced, False),
    "assigned": (_assigned, False),
    "loaded whole": (_loaded, False),
    "data": (_data, True),
    "deepcopy": (copy.deepcopy, True),
}


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("name", APART)
def test_weights_that_lie_apart_are_copied_together_by_each_call(name, dry):
    change, apart = APART[name]
    virtualgpu.gpus(1)
    if dry and name == "loaded whole":
        pytest.skip("a dry run saves nothing to memory")
    with virtualgpu.dry_run() if dry else contextlib.nullcontext(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layer, x = change(nn.LSTM(64, 64).cuda()), torch.zeros(3, 2, 64, device="cuda")
        seen.clear()
        with torch.no_grad():
            layer(x)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(x)
        weights = sum(weight.nbytes for weight in layer.parameters())
        extra = torch.cuda.max_memory_allocated() - before - WORKSPACE
    said = [str(warning.message) for warning in seen if "contiguous chunk" in str(warning.message)]
    assert len(said) == 2 * apart and (extra >= weights) == apart


def test_where_it_is_not_cudnns(gpus):
    """cuDNN off, a type that the card's does not know, and tensors of the CPU."""

    def kernels(make):
        with virtualgpu.recording() as spans:
            make()
        return {span.name for span in spans} & {"_cudnn_rnn", "addmm", "mm", "mkldnn_rnn_layer"}

    x = torch.randn(5, 3, 8)
    assert kernels(lambda: nn.GRU(8, 4).cuda()(x.cuda())) == {"_cudnn_rnn"}
    with torch.backends.cudnn.flags(enabled=False):
        assert "_cudnn_rnn" not in kernels(lambda: nn.GRU(8, 4).cuda()(x.cuda()))
    assert BFLOAT16 > (7, 5)  # a T4's
    assert "_cudnn_rnn" not in kernels(lambda: nn.GRU(8, 4).cuda().bfloat16()(x.cuda().bfloat16()))
    assert kernels(lambda: nn.GRU(8, 4)(x)) == set()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(4, 4, num_layers=3, dropout=0.5, dtype=torch.float64)

    def forward(self, x):
        return self.layers(x)[0]


def test_dropout_between_layers(gpus):
    """Drawn from the GPU's generator; the backward pass drops what the forward pass dropped."""
    torch.manual_seed(0)
    tower, x = Tower().cuda(), torch.randn(5, 3, 4, dtype=torch.float64, device="cuda").requires_grad_()

    def loss(x):
        torch.cuda.manual_seed(1)
        return tower(x).sin().sum()

    state = torch.cuda.get_rng_state()
    first = loss(x)
    assert not torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(first, loss(x)) and not torch.equal(first, tower(x).sin().sum())
    first.backward()
    direction = torch.randn_like(x)
    with torch.no_grad():
        slope = (loss(x + 1e-5 * direction) - loss(x - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((x.grad * direction).sum(), slope, rtol=1e-6, atol=1e-8)
    gradient = x.grad.clone()
    x.grad = None
    torch.cuda.manual_seed(1)
    checkpoint(tower, x, use_reentrant=False).sin().sum().backward()
    assert torch.equal(x.grad, gradient)
    with torch.autograd.graph.save_on_cpu():
        again = loss(x)
    x.grad = None
    again.backward()
    assert torch.equal(x.grad, gradient)
    tower.eval()
    assert torch.equal(tower(x), tower(x))


def test_products_in_tf32():
    def seconds(like):
        with virtualgpu.dry_run(1, like=like, clock="datasheet", host="launch"):
            layer, x = nn.LSTM(1024, 1024, device="cuda"), torch.randn(50, 256, 1024, device="cuda")
            clock = virtualgpu.machine().clock
            torch.cuda.synchronize()
            before = clock.host
            layer(x)
            torch.cuda.synchronize()
            return clock.host - before

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        slow = seconds("A100")
        assert slow == pytest.approx(2 * 50 * 256 * 2048 * 4096 / 19.5e12, rel=0.02)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert seconds("A100") < slow / 4


def test_torchscript_takes_the_cells_of_cpp(gpus):
    """Scripted and traced layers are C++'s from end to end: the same numbers."""
    torch.manual_seed(0)
    tower, x = Tower().cuda().eval(), torch.randn(5, 3, 4, dtype=torch.float64, device="cuda")
    assert torch.equal(torch.jit.script(tower)(x), tower(x))
    traced = torch.jit.trace(tower, (x,))
    assert torch.equal(traced(x), tower(x)) and "aten::lstm" in str(traced.inlined_graph)
