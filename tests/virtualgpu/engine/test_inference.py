"""torch.inference_mode: operations come by whole, not taken apart by autograd; places, numbers, bytes and time are the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")

LINES = {
    "double": lambda x: x.double(),
    "half": lambda x: x.half().float(),
    "reshape": lambda x: x.t().reshape(-1),
    "contiguous": lambda x: x.t().contiguous(),
    "flatten": lambda x: x.t().flatten(),
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "matmul": lambda x: x @ x,
    "conv": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "dropout": lambda x: F.dropout(x, 0.5),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "batch norm": lambda x: F.batch_norm(x, x.mean(0), x.var(0)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(len(x), device=x.device)),
    "pad": lambda x: F.pad(x, (1, 1)),
    "one_hot": lambda x: F.one_hot(x.long().abs(), 9),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64, device=x.device)),
    "chunk": lambda x: torch.cat(x.chunk(3)),
    "new": lambda x: x.new_tensor([1.0]) + torch.tensor(1.0, device=x.device) + torch.as_tensor([2.0], device=x.device),
    "index": lambda x: x[x > 0],
    "std": lambda x: x.std(0),
    "lstm": lambda x: nn.LSTM(6, 3, bidirectional=True).to(x.device)(x[None])[0],
}


def run(line, device):
    torch.manual_seed(0)
    x = torch.randn(6, 6).to(device)
    torch.manual_seed(1)
    return line(x)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_same_as_without_gradients(gpus, line):
    with torch.no_grad():
        expected = run(line, CPU)
        with virtualgpu.recording() as plain:
            run(line, ONE)
        torch.cuda.reset_peak_memory_stats(1)
        run(line, ONE)
        peak = torch.cuda.max_memory_allocated(1)
    with torch.inference_mode():
        with virtualgpu.recording() as inferring:
            found = run(line, ONE)
        place = found.device
        torch.cuda.reset_peak_memory_stats(1)
        del found
        found = run(line, ONE)
        assert torch.equal(found.cpu(), expected) and torch.equal(run(line, CPU), expected)
        assert torch.cuda.max_memory_allocated(1) == peak
    assert place == ONE
    assert [span.name for span in inferring] == [span.name for span in plain]
    assert seconds(inferring) == pytest.approx(seconds(plain))


def seconds(spans):
    return [span.end - span.start for span in spans]


def test_places_are_checked(gpus):
    with torch.inference_mode():
        x = torch.ones(2, 2, device="cuda")
        for line in (
            lambda: F.linear(x, torch.ones(2, 2)),
            lambda: x @ torch.ones(2, 2, device=ONE),
            lambda: x.to(ONE) + x,
        ):
            with pytest.raises(RuntimeError, match="same device"):
                line()
        assert x.to("cuda:1", torch.float16).device == ONE and x.cpu().device == CPU
        with pytest.raises(torch.OutOfMemoryError):
            F.linear(x.expand(1 << 20, 2, 2), x.repeat(1 << 18, 1))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_model_is_evaluated(gpus, context):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    x = torch.randn(2, 3, 8, 8)
    with context():
        expected = model(x)
        assert torch.equal(model.to(ONE)(x.to(ONE)).cpu(), expected)
    with virtualgpu.dry_run(), context():
        dry = nn.Conv2d(3, 4, 3).to(ONE)(torch.ones(2, 3, 8, 8, device=ONE)).reshape(2, -1).double()
        assert dry.device == ONE and dry.shape == (2, 144)


def test_changing_a_shape_in_place_is_no_kernel(gpus):
    x = torch.ones(2, 3, device="cuda")
    with virtualgpu.recording() as spans:
        x.t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1).detach_()
    assert not spans and x.shape == (2, 3) and x.device == ZERO


def test_flex_attention(gpus):
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16, device=ONE)
    out = flex_attention(q, q, q)
    assert out.device == ONE
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q), atol=1e-5, rtol=1e-4)


def test_a_transformer_encoder_with_padding(gpus):
    """In evaluation PyTorch makes a nested tensor of what the mask leaves; zeros stand where the padding was."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [2]])
    with torch.no_grad():
        there = model(x, src_key_padding_mask=padding)
        here = model.to(ONE)(x.to(ONE), src_key_padding_mask=padding.to(ONE))
        with virtualgpu.dry_run(), pytest.warns(UserWarning, match="works on the padding"):
            made = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval().to(ONE)
            assert made(x.to(ONE), src_key_padding_mask=padding.to(ONE)).shape == x.shape
    assert here.device == ONE
    torch.testing.assert_close(here.cpu(), there)
    assert not here.cpu()[padding].any()
