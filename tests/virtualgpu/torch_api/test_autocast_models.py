"""autocast("cuda") over models: the dtype of each module as on CUDA, numbers and gradients as by hand, the scaler."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from tests.virtualgpu.rounded import RoundedProducts
from tests.virtualgpu.torch_api.autocast_tools import (
    BF16,
    F16,
    F32,
    MODELS,
    as_pytorch_does,
    autocast_gpus,
    cells,
    convolutions,
    dtypes_in,
    equal,
    kinds,
    on_cuda,
)


@pytest.fixture(autouse=True)
def gpus(monkeypatch, pytorchs):
    with autocast_gpus(monkeypatch) as off:
        yield off


@pytest.fixture(scope="module")
def pytorchs():
    """What PyTorch's own kernels for AutocastCUDA give, on fake tensors that say they are CUDA's: {model: dtypes}."""
    kinds = [(build, dtype) for build in MODELS for dtype in (F16, BF16)]
    if torch.version.cuda is None:  # a linear layer, fake and under autocast, may abort the process
        return dict.fromkeys(kinds)
    return {
        (build, dtype): as_pytorch_does(lambda build=build: dtypes_in(*on_cuda(build)), dtype) for build, dtype in kinds
    }


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("build", MODELS)
def test_modules_give_the_dtypes_of_cuda(build, dry, pytorchs):
    for dtype in (F16, BF16):
        with virtualgpu.dry_run() if dry else contextlib.nullcontext():
            model, inputs = on_cuda(build)
            with torch.autocast("cuda", dtype):
                ours = dtypes_in(model, inputs)
        theirs = pytorchs[build, dtype]
        if theirs is None:
            pytest.skip("here PyTorch asks the driver even of fake tensors")
        assert ours == theirs
        assert {dtype, F32} >= {kind for _, found in ours for kind in found} > {F32} or build is cells


def test_layers_have_these_dtypes():
    """By CUDA's lists, written out for the reader."""
    model, inputs = on_cuda(convolutions)
    with torch.autocast("cuda"):
        names = [type(module).__name__ for module in model]
        found = [kind for _, (kind,) in dtypes_in(model, inputs)[:-1]]
    assert dict(zip(names, found, strict=True)) == {
        "Conv2d": F16,
        "BatchNorm2d": F16,
        "ReLU": F16,
        "MaxPool2d": F16,
        "Flatten": F16,
        "Linear": F16,
        "GELU": F16,
        "LogSoftmax": F32,
    }


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_float16_as_cudnns(kind):
    layer, x = kind(3, 4, 2, bidirectional=True), torch.rand(5, 2, 3)
    theirs = kind(3, 4, 2, bidirectional=True)
    theirs.load_state_dict(layer.state_dict())
    theirs, expected = theirs.half(), None
    expected = theirs(x.half())
    layer.cuda()
    for dtype in (F16, BF16):  # cuDNN's rule knows float16 alone
        with torch.autocast("cuda", dtype):
            assert equal(layer(x.cuda()), expected)
            assert set(kinds(layer(x.cuda().to(dtype)))) == {F16}
    layer(x.cuda())[0].sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {F32}
    with virtualgpu.dry_run(), torch.autocast("cuda", BF16):
        assert set(kinds(kind(3, 4).cuda()(torch.rand(5, 2, 3, device="cuda")))) == {F16}
    with torch.backends.cudnn.flags(enabled=False), torch.autocast("cuda", BF16):
        assert set(kinds(layer(x.cuda()))) == {BF16}


def test_training_equals_casts_by_hand():
    model, (x,) = convolutions()
    by_hand, _ = convolutions()
    by_hand.load_state_dict(model.state_dict())
    target = torch.tensor([1, 2])
    convolution, norm, relu, pool, flat, linear, gelu, _ = by_hand
    with RoundedProducts():
        h = F.conv2d(x.half(), convolution.weight.half(), convolution.bias.half())
        h = flat(pool(relu(norm(h))))
        h = gelu(F.linear(h, linear.weight.half(), linear.bias.half()))
        expected = F.nll_loss(h.log_softmax(1, dtype=F32), target)
        expected.backward()
    model.cuda()
    with torch.autocast("cuda"):
        loss = F.nll_loss(model(x.cuda()), target.cuda())
    loss.backward()
    assert equal(loss, expected)
    assert equal([p.grad for p in model.parameters()], [p.grad for p in by_hand.parameters()])
    assert {p.grad.dtype for p in model.parameters()} == {F32}


# -- the scaler


def scaled_step(model, optimizer, scaler, x, factor=1.0):
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = model(x).float().sum() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_scaler_skips_a_step_with_infinite_gradients():
    model, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=1)
    before = model.weight.detach().clone()
    scaled_step(model, optimizer, scaler, x, 1e6)  # beyond float16
    assert scaler.get_scale() == 512 and torch.equal(model.weight, before)
    scaled_step(model, optimizer, scaler, x)
    assert scaler.get_scale() == 1024
    expected = x.cpu().half().sum(0, dtype=F32).expand(4, 4)
    assert torch.allclose((before - model.weight).cpu(), 0.1 * expected, rtol=1e-3)


@pytest.mark.parametrize("unscale", [False, True])
def test_scaler_takes_the_step_in_a_dry_run(unscale):
    with warnings.catch_warnings(), virtualgpu.dry_run(), virtualgpu.recording() as spans:
        warnings.simplefilter("error")
        model, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(x).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert len(optimizer.state) == 2 and any(span.kind == "optimizer" for span in spans)
