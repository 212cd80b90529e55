# ruff: noqa: F403, F405
"""Half precision as a GPU has it: products, convolutions and grids are those of float32, rounded once; norms keep single statistics."""

import pytest

from tests.virtualgpu.engine.tools import *
from tests.virtualgpu.rounded import RoundedProducts
from virtualgpu.engine import cuda_differences

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


def inputs(shapes, device, last=False):
    torch.manual_seed(2)
    made = [torch.randn(shape).to(HALF) for shape in shapes]
    if last:
        made = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in made]
    return [x.to(device).requires_grad_() for x in made]


@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_layout_of_products(name, last, gpus, monkeypatch):
    """Forward and backward, in every bit."""
    function, *shapes = PRODUCTS[name]
    calls, run = [], cuda_differences.run_in_float32
    monkeypatch.setattr(
        cuda_differences, "run_in_float32", lambda op, *rest: (calls.append(op.func), run(op, *rest))[1]
    )
    both, cpu = [], RoundedProducts()
    for device, mode in (("cpu", cpu), ("cuda", contextlib.nullcontext())):
        leaves = inputs(shapes, device, last)
        with mode:
            out = function(*leaves)
            both.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) * 0.3)])
    assert calls == cpu.calls and len(calls) >= 2
    for theirs, ours in zip(*both, strict=True):
        assert (ours.device.type, ours.dtype, ours.stride()) == ("cuda", HALF, theirs.stride())
        assert torch.equal(theirs, ours.cpu())
    plain = function(*inputs(shapes, "cpu", last))  # the CPU's own kernel: the same layout, and nearly the numbers
    assert plain.stride() == out.stride()
    torch.testing.assert_close(out.cpu(), plain, rtol=1e-2, atol=1e-2)


def test_bytes_and_seconds_are_those_of_float16():
    def work():
        a = ones(256, 256, dtype=HALF)
        torch.mm(a, a)  # cuBLAS's workspace is there from now on
        return [used(lambda: a @ a)]

    with virtualgpu.gpus(1):
        ((out, [held, _peak]),) = work()
        assert out.untyped_storage().nbytes() == held == 256 * 256 * 2
    same_when_dry(lambda: [out for out, _ in work()])


def test_in_place_and_into_a_tensor(gpus):
    c, a, b = (x.detach() for x in inputs([(30, 20), (30, 40), (40, 20)], "cuda"))
    expected = (c.float() + a.float() @ b.float()).half()
    out = torch.empty(0, dtype=HALF, device="cuda")
    assert torch.mm(a, b, out=out) is out and torch.equal(out, (a.float() @ b.float()).half())
    assert out.untyped_storage().nbytes() == 30 * 20 * 2
    assert torch.mm(a, b, out=(there := torch.empty_like(c))) is there and torch.equal(there, out)
    assert c.addmm_(a, b) is c and c.dtype is HALF
    torch.testing.assert_close(c, expected, rtol=1e-3, atol=1e-3)  # added before it is rounded, or after


def test_other_types_keep_the_kernel_of_the_cpu(gpus, monkeypatch):
    monkeypatch.setattr(cuda_differences, "run_in_float32", None)
    for dtype in (SINGLE, BRAIN):
        a = torch.randn(20, 20).to(dtype)
        assert torch.equal((a.cuda() @ a.cuda()).cpu(), a @ a)
    a = torch.randn(20, 20).half()
    assert (a @ a).dtype is HALF  # on the CPU itself
    assert torch.equal((a.cuda() @ a[0].cuda()).cpu(), a @ a[0])  # a vector: as fast


def test_a_sum_beyond_float16s_steps_is_kept(gpus):
    """2048 + 1 is 2048 in float16: who adds up in float16 stays there."""
    assert F.conv2d(halves(1, 1, 64, 64), halves(1, 1, 63, 63)).flatten().tolist() == [3968.0] * 4


def test_however_the_program_says_the_precision_of_float32(gpus):
    """set_float32_matmul_precision and allow_tf32, asked after the newer fp32_precision, raise. On processors that multiply in bfloat16,
    "medium" would be below float16: there it is float64."""
    a, b = halves(8, 16), torch.randn(20, 20).half()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert (a @ a.T).unique().tolist() == [16]
        assert F.scaled_dot_product_attention(a[None], a[None], a[None]).unique().tolist() == [1]
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    before = torch.get_float32_matmul_precision()
    assert before == "highest" and cuda_differences.accumulated_in() is SINGLE
    try:
        torch.set_float32_matmul_precision("medium")
        assert cuda_differences.accumulated_in() is DOUBLE
        assert torch.equal((b.cuda() @ b.cuda()).cpu(), (b.double() @ b.double()).half())
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [HALF, BRAIN])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_grid_is_sampled_in_single_precision(kind, dims, gpus):
    torch.manual_seed(2)
    x, grid = torch.randn(2, 3, *[16] * dims).to(kind), (torch.rand(2, *[8] * dims, dims) * 2 - 1).to(kind)

    def sample(x, grid):
        return F.grid_sample(x, grid, align_corners=False)

    found, exact = gradients(sample, x, grid, device="cuda"), gradients(sample, x.float(), grid.float())
    assert all(one.dtype is kind and torch.equal(one, other.to(kind)) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("half", [HALF, BRAIN])
@pytest.mark.parametrize("weighted", [True, False])
def test_layer_norm_keeps_statistics_that_are_not_rounded(gpus, half, weighted):
    torch.manual_seed(0)
    x, *weights, slope = (torch.randn(shape).to(half) for shape in ((6, 32), (32,), (32,), (6, 32)))
    x, weights = x * 3 + 1, weights * weighted

    def norm(x, weight=None, bias=None):
        return F.layer_norm(x, (32,), weight, bias)

    found = gradients(norm, x, *weights, device="cuda", slope=slope)
    exact = gradients(norm, x.float(), *(weight.float() for weight in weights), slope=slope)
    assert torch.equal(found[0], norm(x, *weights))
    for one, other in zip(found[1:], exact[1:], strict=True):
        torch.testing.assert_close(one, other.to(half))
    _, mean, rstd = torch.native_layer_norm(
        x.cuda(), (32,), *[w.cuda() for w in weights or ones(2, 32, dtype=half)], 1e-5
    )
    assert mean.dtype is rstd.dtype is SINGLE and mean.is_cuda
    torch.testing.assert_close(mean.cpu(), x.float().mean(-1, keepdim=True))

    def step():
        x, weight, bias = (ones(*shape, dtype=half, learns=True) for shape in ((64, 300, 8), (8,), (8,)))
        out, [kept, _] = used(lambda: F.layer_norm(x, (8,), weight, bias))
        assert kept == 64 * 300 * (8 * 2 + 2 * 4)
        return out, *torch.autograd.grad(out, [x, weight, bias], x.detach())

    same_when_dry(step)


NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "BatchNorm2d, plain": lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "InstanceNorm2d, plain": lambda: nn.InstanceNorm2d(4),
}


@pytest.mark.parametrize("half", [BRAIN, HALF])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_batch_norm_of_a_half_model_reckons_in_single_precision(gpus, half, training, norm):
    """As a GPU: mean and deviation are not rounded, so that results are those of single precision, rounded once."""
    torch.manual_seed(0)
    single, model = norm().train(training), norm().to("cuda", half).train(training)
    x, slope = torch.randn(3, 4, 5, 5).to(half), torch.randn(3, 4, 5, 5).to(half)
    exact, there = x.float().requires_grad_(), x.cuda().requires_grad_()
    expected, found = single(exact), model(there)
    expected.backward(slope.float())
    found.backward(slope.cuda())
    assert torch.equal(found.cpu(), expected.to(half)) and torch.equal(there.grad.cpu(), exact.grad.to(half))
    for ours, theirs in zip(model.buffers(), single.buffers(), strict=True):  # instance norm: means of rounded ones
        torch.testing.assert_close(ours.cpu(), theirs.to(ours.dtype), rtol=0.02, atol=0.001)
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):  # sums of rounded ones
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad.to(half), rtol=0.02, atol=0.1)
    mean = torch.native_batch_norm(there, None, None, None, None, True, 0.1, 1e-5)[1]
    assert mean.is_cuda and mean.dtype is SINGLE


@pytest.mark.parametrize("half", [BRAIN, HALF])
def test_batch_norm_of_half_weights_with_single_running_figures(gpus, half):
    """As FSDP's mixed precision has it: CUDA takes that, though not in the backward of pictures in rows."""

    def step(x, weights, dry=False):
        norm = (nn.BatchNorm1d if x.dim() == 2 else nn.BatchNorm2d)(4, device="cuda")
        norm.weight, norm.bias = (nn.Parameter(p.detach().to(weights)) for p in (norm.weight, norm.bias))
        x = x.to("cuda", half).requires_grad_()
        out, [held, _] = used(lambda: norm(x))
        (out * out).sum().backward()
        assert (out.dtype, x.grad.dtype, norm.weight.grad.dtype) == (half, half, weights)
        return held, dry or (out.tolist(), x.grad.tolist(), norm.running_mean.tolist())

    torch.manual_seed(0)
    rows, pictures = torch.randn(6, 4), torch.randn(3, 4, 5, 5)
    for x in (rows, pictures.to(memory_format=torch.channels_last)):
        assert step(x, half) == step(x, SINGLE)
    with pytest.raises(RuntimeError, match="Expected running_mean to have type"):
        step(pictures, half)
    held, _ = step(rows, half)
    with virtualgpu.dry_run():
        assert step(torch.empty(6, 4), half, dry=True)[0] == held


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE, HALF, BRAIN])
@pytest.mark.parametrize("shape", [(8,), (4, 8)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_one_kernel_with_the_cpus_numbers(gpus, dtype, shape, weighted):
    torch.manual_seed(0)
    x, weight, slope = (torch.randn(size, dtype=dtype) for size in ((2, 4, 8), shape, (2, 4, 8)))

    def norm(x, weight=None):
        out = F.rms_norm(x, shape, weight)
        assert x.device.type == "cpu" or "FusedRmsNorm" in out.grad_fn.name()
        return out

    tensors = (x, weight)[: 1 + weighted]
    torch.testing.assert_close(*(gradients(norm, *tensors, device=device, slope=slope) for device in ("cpu", "cuda")))


def test_rms_norm_that_is_not_fused_second_derivatives_and_autocast(gpus):
    x, layer = rand(2, 4, 4, 8), nn.RMSNorm(8).cuda()
    assert "Fused" not in F.rms_norm(x.half(), (8,), ones(8)).grad_fn.name()  # weights of another type
    assert "Fused" not in F.rms_norm(x.to(memory_format=torch.channels_last), (8,)).grad_fn.name()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.rms_norm(x, (7,))
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.sum().backward()
    assert x.grad.shape == x.shape
    with torch.autocast("cuda", BRAIN):
        assert layer(x).dtype is SINGLE
