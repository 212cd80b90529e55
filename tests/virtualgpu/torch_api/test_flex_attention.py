"""flex_attention: its numbers and gradients, and the memory and time of the one kernel that it is on a GPU."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import virtualgpu

LENGTH, DOCUMENT = 256, 100


def documents(device):
    """Tokens see those before them in their document: a mask that takes a tensor from around it."""
    of = torch.arange(LENGTH).to(device) // DOCUMENT
    return lambda batch, head, query, key: (query >= key) & (of[query] == of[key])


def leaves(device="cpu"):
    """Query, key and value [2, heads, LENGTH, 16], of 4, 2 and 2 heads, the same on every device."""
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 16).to(device).requires_grad_() for heads in (4, 2, 2)]


def test_it_learns_what_attention_with_that_mask_does(gpus):
    rows = torch.arange(LENGTH)
    plain, virtual = leaves(), leaves("cuda")
    mask = documents("cpu")(0, 0, rows[:, None], rows[None])
    F.scaled_dot_product_attention(*plain, attn_mask=mask, enable_gqa=True).sin().sum().backward()
    blocks = create_block_mask(documents("cuda"), None, None, LENGTH, LENGTH, device="cuda")
    before = torch.cuda.memory_allocated()
    out = torch.compile(flex_attention)(*virtual, block_mask=blocks, enable_gqa=True)
    # one output, and a float for each row of scores; never the scores, 2 MiB
    assert torch.cuda.memory_allocated() - before == out.nbytes + 2 * 4 * LENGTH * 4
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    out.sin().sum().backward()
    for expected, leaf in zip(plain, virtual, strict=True):
        assert leaf.grad.is_cuda
        torch.testing.assert_close(leaf.grad.cpu(), expected.grad, atol=1e-5, rtol=1e-4)


def test_scores_may_change_by_a_constant_and_not_by_what_would_learn(gpus):
    query, key, value = leaves("cuda")
    bias = torch.randn(4, device="cuda", requires_grad=True)
    constant = bias.detach()
    flex_attention(query, key, value, lambda s, b, h, q, k: s + constant[h], enable_gqa=True).sum().backward()
    assert query.grad.abs().sum() > 0
    with pytest.raises(NotImplementedError, match="detach it before"):
        flex_attention(query, key, value, lambda s, b, h, q, k: s + bias[h], enable_gqa=True)


def test_a_dry_run_has_the_kernel_and_not_the_scores():
    with virtualgpu.dry_run(like="H100"):
        x = torch.randn(1, 4, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with virtualgpu.recording() as spans:
            flex_attention(x, x, x).sum().backward()
        assert x.grad.shape == x.shape
        assert torch.cuda.max_memory_allocated() < 64 << 20  # the scores alone would be 1 GiB
        assert [span.name for span in spans if "flex" in span.name] == ["flex_attention", "flex_attention_backward"]


def test_autocast_casts_it(gpus):
    query, key, value = leaves("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = flex_attention(query, key, value, enable_gqa=True)
        out.sum().backward()
    assert out.dtype == torch.bfloat16 and query.grad.dtype == torch.float32
    expected = flex_attention(*(tensor.bfloat16() for tensor in (query, key, value)), enable_gqa=True)
    assert torch.equal(out, expected)


def test_tensors_of_the_cpu_are_none_of_its_business(gpus):
    query, key, value = (tensor.detach() for tensor in leaves())
    out = flex_attention(query, key, value, enable_gqa=True)
    assert out.device.type == "cpu" and not torch.cuda.memory_allocated()


def test_it_works_on_the_blocks_that_its_mask_leaves():
    """A causal mask over 16 x 16 blocks leaves 136 of them; where a dry run does not know the mask, it takes all."""
    length = 2048

    def seconds(mask_mod):
        blocks = create_block_mask(mask_mod, None, None, length, length, device="cuda")
        x = torch.randn(1, 8, length, 64, device="cuda").requires_grad_()
        with virtualgpu.recording() as spans, torch.no_grad():
            flex_attention(x, x, x, block_mask=blocks)
        return sum(span.end - span.start for span in spans if span.name == "flex_attention")

    def everything(b, h, q, k):
        return q >= 0

    def causal(b, h, q, k):
        return q >= k

    with virtualgpu.gpus(1, like="T4"):
        full = seconds(everything)
        assert seconds(causal) / full == pytest.approx(136 / 256, rel=0.05)
    with virtualgpu.dry_run(1, like="T4"):
        assert seconds(causal) == pytest.approx(full)
