"""Products and convolutions of float16 are those of float32, rounded: values, layout, bytes, and that the fast kernel is the one taken."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import virtualgpu
from tests.virtualgpu.rounded import RoundedProducts
from virtualgpu.engine import half_precision

HALF = torch.float16
# what is called, and the shapes of its tensors
PRODUCTS = {
    "mm": (torch.mm, (30, 40), (40, 20)),
    "transposed": (lambda a, b: a.t() @ b.t(), (40, 30), (20, 40)),
    "addmm": (torch.addmm, (20,), (30, 40), (40, 20)),
    "scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (30, 20), (30, 40), (40, 20)),
    "bmm": (torch.bmm, (3, 30, 40), (3, 40, 20)),
    "baddbmm": (torch.baddbmm, (3, 30, 20), (3, 30, 40), (3, 40, 20)),
    "expanded": (lambda a, b: torch.bmm(a, b.expand(3, 40, 20)), (3, 30, 40), (1, 40, 20)),
    "linear": (F.linear, (2, 5, 40), (20, 40), (20,)),
    "convolution": (F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), (6,)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), (2, 4, 9, 9), (4, 1, 3, 3)),
    "transposed convolution": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 4, 9, 9), (4, 6, 3, 3)),
    "one dimension": (F.conv1d, (2, 4, 19), (6, 4, 3)),
}


def tensors(shapes, device, last=False):
    torch.manual_seed(2)
    made = [torch.randn(shape).to(HALF) for shape in shapes]
    if last:
        made = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in made]
    return [x.to(device).requires_grad_() for x in made]


@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_layout(name, last, gpus, monkeypatch):
    """Forward and backward, in every bit."""
    function, *shapes = PRODUCTS[name]
    calls, run = [], half_precision.run
    monkeypatch.setattr(half_precision, "run", lambda op, *rest: (calls.append(op.func), run(op, *rest))[1])
    both, cpu = [], RoundedProducts()
    for device, way in (("cpu", cpu), ("cuda", contextlib.nullcontext())):
        leaves = tensors(shapes, device, last)
        with way:
            out = function(*leaves)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out) * 0.3)
        both.append([out.detach(), *grads])
    assert calls == cpu.calls and len(calls) >= 2
    for theirs, ours in zip(*both, strict=True):
        assert (ours.device.type, ours.dtype, ours.stride()) == ("cuda", HALF, theirs.stride())
        assert torch.equal(theirs, ours.cpu())
    plain = function(*tensors(shapes, "cpu", last))  # the CPU's own kernel: the same layout, and nearly the numbers
    assert plain.stride() == out.stride()
    torch.testing.assert_close(out.cpu(), plain, rtol=1e-2, atol=1e-2)


def test_bytes_and_seconds_are_those_of_float16(gpus):
    def work():
        a, b = (torch.ones(256, 256, dtype=HALF, device="cuda") for _ in range(2))
        torch.mm(a, b)  # cuBLAS's workspace is there from now on
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), virtualgpu.machine().clock.latest()
        c = a @ b
        figures = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        return c.untyped_storage().nbytes(), *figures, virtualgpu.machine().clock.latest() - begin

    with virtualgpu.gpus(1):
        found = work()
    with virtualgpu.dry_run(1):
        assert found == work()
    assert found[:2] == (256 * 256 * 2,) * 2


def test_in_place_and_into_a_tensor(gpus):
    c, a, b = (x.detach() for x in tensors([(30, 20), (30, 40), (40, 20)], "cuda"))
    expected = (c.float() + a.float() @ b.float()).half()
    out = torch.empty(0, dtype=HALF, device="cuda")
    assert torch.mm(a, b, out=out) is out and torch.equal(out, (a.float() @ b.float()).half())
    assert out.untyped_storage().nbytes() == 30 * 20 * 2
    assert torch.mm(a, b, out=(there := torch.empty_like(c))) is there and torch.equal(there, out)
    same = c.addmm_(a, b)
    assert same is c and c.dtype is HALF
    torch.testing.assert_close(c, expected, rtol=1e-3, atol=1e-3)  # added before it is rounded, or after


def test_other_types_keep_the_kernel_of_the_cpu(gpus, monkeypatch):
    monkeypatch.setattr(half_precision, "run", None)
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(20, 20).to(dtype)
        assert torch.equal((a.cuda() @ a.cuda()).cpu(), a @ a)
    a = torch.randn(20, 20).half()
    assert (a @ a).dtype is HALF  # on the CPU itself
    assert torch.equal((a.cuda() @ a[0].cuda()).cpu(), a @ a[0])  # a vector: as fast


def test_a_sum_beyond_float16s_steps_is_kept(gpus):
    """2048 + 1 is 2048 in float16: who adds up in float16 stays there."""
    x = torch.ones(1, 1, 64, 64, dtype=HALF, device="cuda")
    assert F.conv2d(x, torch.ones(1, 1, 63, 63, dtype=HALF, device="cuda")).flatten().tolist() == [3968.0] * 4


def test_however_the_program_says_the_precision_of_float32(gpus):
    """set_float32_matmul_precision and allow_tf32, asked after the newer fp32_precision, raise."""
    a = torch.ones(8, 16, dtype=HALF, device="cuda")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert (a @ a.T).unique().tolist() == [16]
        assert F.scaled_dot_product_attention(a[None], a[None], a[None]).unique().tolist() == [1]
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


def test_no_less_exact_where_float32_is_let_be(gpus):
    """On processors that multiply in bfloat16, "medium" would be below float16: there it is float64."""
    assert half_precision.accumulated_in() is torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert half_precision.accumulated_in() is torch.float64
        a = torch.randn(20, 20).half()
        assert torch.equal((a.cuda() @ a.cuda()).cpu(), (a.double() @ a.double()).half())
    finally:
        torch.set_float32_matmul_precision(before)


def test_pytorchs_words_for_what_does_not_fit(gpus):
    a = torch.ones(3, 4, dtype=HALF, device="cuda")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        a @ a
    with pytest.raises(RuntimeError, match="same dtype"):
        a @ torch.ones(4, 3, device="cuda")


@pytest.mark.parametrize("kind", [HALF, torch.bfloat16])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_grid_is_sampled_in_single_precision(kind, dims, gpus):
    torch.manual_seed(2)
    x, grid = torch.randn(2, 3, *[16] * dims).to(kind), (torch.rand(2, *[8] * dims, dims) * 2 - 1).to(kind)
    leaves = [tensor.cuda().requires_grad_() for tensor in (x, grid)]
    exact = [tensor.float().requires_grad_() for tensor in (x, grid)]
    out = F.grid_sample(*leaves, align_corners=False)
    wide = F.grid_sample(*exact, align_corners=False)
    slopes = torch.autograd.grad(out, leaves, torch.ones_like(out))
    expected = torch.autograd.grad(wide, exact, torch.ones_like(wide))
    for found, right in zip((out, *slopes), (wide, *expected), strict=True):
        assert (found.device.type, found.dtype) == ("cuda", kind) and torch.equal(found.cpu(), right.to(kind))
