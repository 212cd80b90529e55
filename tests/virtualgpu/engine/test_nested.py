"""Nested tensors of the strided layout: where they are, and that their numbers are the CPU's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")


def rows(*lengths):
    return [torch.arange(length * 4.0).reshape(length, 4).cos() for length in lengths]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_with_a_padding_mask_in_evaluation(gpus, mode):
    """It makes a nested tensor of its input, and pads with zeros again."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[3], [5], [1]])
    with mode():
        here = encoder(x, src_key_padding_mask=padding)
        before = virtualgpu.machine().clock.ready(1)
        there = encoder.cuda(1)(x.to(ONE), src_key_padding_mask=padding.to(ONE))
    assert there.device == ONE and torch.equal(there.cpu(), here)
    assert (there[0, 3:] == 0).all()
    assert virtualgpu.machine().clock.ready(1) > before


def test_places_and_bytes(gpus):
    before = torch.cuda.memory_allocated(1)
    nested = torch.nested.nested_tensor(rows(32, 96), device="cuda:1")  # 128 x 4 numbers
    assert nested.device == ONE and torch.cuda.memory_allocated(1) - before == 2048
    doubled = nested * 2
    assert torch.cuda.memory_allocated(1) - before == 4096
    elsewhere = [doubled.to("cuda:0"), doubled.half(), doubled.cpu(), doubled.transpose(1, 2), *doubled.unbind()]
    assert [part.device for part in elsewhere] == [ZERO, ONE, torch.device("cpu"), ONE, ONE, ONE]
    for part, row in zip(elsewhere[2].unbind(), rows(32, 96), strict=True):
        assert torch.equal(part, row * 2)
    assert torch.nested.nested_tensor(rows(2)).device.type == "cpu"
    assert torch.nested.nested_tensor([], device=ONE).device == ONE
    assert torch.nested.as_nested_tensor([row.cuda() for row in rows(2, 3)]).device == ZERO


def test_what_lies_elsewhere_is_refused(gpus):
    nested = torch.nested.nested_tensor(rows(2, 3), device=ONE)
    for attempt in (lambda: nested + nested.cpu(), lambda: F.linear(nested, torch.ones(2, 4, device=ZERO))):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            attempt()


def test_gradients_are_the_cpus(gpus):
    def gradient(device):
        weight = torch.linspace(-1, 1, 12).reshape(3, 4).to(device).requires_grad_()
        nested = torch.nested.nested_tensor(rows(2, 3), device=device)
        F.linear(nested, weight).softmax(-1).to_padded_tensor(0.5).square().sum().backward()
        return weight.grad

    there = gradient(ONE)
    assert there.device == ONE and torch.equal(there.cpu(), gradient("cpu"))


def test_attention(gpus):
    def attend(device):
        parts = [row.reshape(-1, 2, 2) for row in rows(2, 5)]
        nested = torch.nested.nested_tensor(parts, device=device).transpose(1, 2)
        if device != ONE:
            nested = nested.contiguous()  # which the CPU asks for, and no fused kernel of a GPU
        return F.scaled_dot_product_attention(nested, nested, nested).to_padded_tensor(0.0)

    there = attend(ONE)
    assert there.device == ONE and torch.equal(there.cpu(), attend("cpu"))


def test_dropout_draws_from_the_gpu(gpus):
    nested, state = torch.nested.nested_tensor(rows(8, 8), device=ONE), torch.get_rng_state()
    torch.cuda.manual_seed_all(3)
    first = F.dropout(nested, 0.5).to_padded_tensor(0.0)
    torch.cuda.manual_seed_all(3)
    assert torch.equal(first, F.dropout(nested, 0.5).to_padded_tensor(0.0)) and torch.equal(
        torch.get_rng_state(), state
    )


def test_a_dry_run_names_the_cure(gpus):
    with virtualgpu.dry_run(), pytest.raises(NotImplementedError, match=r"layout=torch\.jagged"):
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device="cuda")


def jagged(device):
    """What two sequences in one tensor come to, forward and backward."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(4, 4).to(device), nn.LayerNorm(4).to(device)
    rows = torch.arange(32.0).view(8, 4).to(device).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 8], device=device))
    heads = nested.detach().unflatten(-1, (2, 2)).transpose(1, 2)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
    out = norm(torch.relu(layer(nested)))
    padded = torch.nested.to_padded_tensor(out, 0.0)
    (out.values().sum() + padded.square().sum()).backward()
    return out, attended.values(), padded, rows.grad, layer.weight.grad


def test_the_jagged_layout_trains(gpus):
    """C++ took the wrapper to be on a real GPU, and the backward pass asked the driver."""
    on_gpu, on_cpu = jagged("cuda"), jagged("cpu")
    assert {str(tensor.device) for tensor in on_gpu} == {"cuda:0"} and on_gpu[0].is_cuda
    assert {str(tensor.device) for tensor in on_cpu} == {"cpu"}
    assert str(on_gpu[0].cpu().values().device) == "cpu"
    for ours, theirs in zip(on_gpu[1:], on_cpu[1:], strict=True):
        assert torch.equal(ours.cpu(), theirs)
