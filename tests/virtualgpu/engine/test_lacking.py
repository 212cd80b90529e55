"""Operations that PyTorch has for CUDA alone: SyncBatchNorm's, and products with a dtype of their own."""

import pytest
import torch
from torch import nn

import virtualgpu

EPS = 1e-5
HALVES = 3, 5  # rows on each of two GPUs


def forward_and_backward(kind, weight_kind=torch.float32):
    """What SyncBatchNorm does on two GPUs, and BatchNorm with all rows on the CPU: two lists of results."""
    torch.manual_seed(0)
    x = torch.randn(sum(HALVES), 4, 3, 2).to(kind)
    dy = torch.randn_like(x)
    weight, bias = torch.rand(4, dtype=weight_kind), torch.rand(4, dtype=weight_kind)
    running = torch.zeros(4), torch.ones(4)
    exact, w, b = x.float().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    means, variances = running[0].clone(), running[1].clone()
    y = torch.nn.functional.batch_norm(exact, means, variances, w, b, training=True, momentum=0.1, eps=EPS)
    y.backward(dy.float())
    wanted = [y.detach(), exact.grad, w.grad, b.grad, means, variances]

    parts = [part.to(f"cuda:{gpu}") for gpu, part in enumerate(x.split(HALVES))]
    slopes = [part.to(f"cuda:{gpu}") for gpu, part in enumerate(dy.split(HALVES))]
    stats = [torch.batch_norm_stats(part, EPS) for part in parts]
    assert all(figure.dtype is torch.float32 for pair in stats for figure in pair)
    counts = torch.tensor([[part.numel() // 4] for part in parts], dtype=torch.float32)
    found, sums = [], []
    for gpu, (part, slope) in enumerate(zip(parts, slopes, strict=True)):
        there = torch.device("cuda", gpu)
        mean, invstd = (torch.stack([pair[at].to(there) for pair in stats]) for at in (0, 1))
        figures = [figure.to(there) for figure in running]
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            part, mean, invstd, *figures, 0.1, EPS, counts.to(there).view(-1)
        )
        w, b = weight.to(there), bias.to(there)
        out = torch.batch_norm_elemt(part, w, b, mean, invstd, EPS)
        reduced = torch.batch_norm_backward_reduce(slope, part, mean, invstd, w, True, True, True)
        sums.append((part, slope, mean, invstd, w, reduced))
        found.append([out.cpu(), *(figure.cpu() for figure in figures)])
    total = [sum(reduced[at].cpu() for *_, reduced in sums) for at in range(4)]
    gradients = [
        torch.batch_norm_backward_elemt(
            slope, part, mean, invstd, w, total[0].to(w.device), total[1].to(w.device), counts.int().to(w.device)
        )
        for part, slope, mean, invstd, w, _ in sums
    ]
    assert [gradient.device.index for gradient in gradients] == [0, 1]
    y = torch.cat([out for out, *_ in found])
    return wanted, [y, torch.cat([g.cpu() for g in gradients]), total[2], total[3], *found[1][1:]]


@pytest.mark.parametrize(("kind", "near"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_synchronized_batch_norm_on_two_gpus_is_batch_norm_of_all_rows(kind, near):
    with virtualgpu.gpus(2):
        wanted, found = forward_and_backward(kind)
    assert [figure.dtype for figure in found[:2]] == [kind, kind]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=near, atol=near)


def test_one_count_for_all():
    with virtualgpu.gpus(1):
        mean, invstd = torch.tensor([[0.0], [2.0]], device="cuda"), torch.full((2, 1), 0.5, device="cuda")
        running = torch.ones(1, device="cuda"), torch.full((1,), 3.0, device="cuda")
        found = torch.batch_norm_gather_stats(torch.empty(4, 1, device="cuda"), mean, invstd, *running, 0.5, 0.0, 2)
        assert found[0].item() == 1.0
        assert found[1].item() == pytest.approx(5**-0.5)  # variances of 4 each, and the means 1 from the middle
        assert running[0].item() == 1.0
        assert running[1].item() == pytest.approx(0.5 * 3 + 0.5 * 5 * 4 / 3)


def test_what_is_not_wanted_is_none():
    with virtualgpu.gpus(1):
        x, figure = torch.ones(2, 3, device="cuda"), torch.ones(3, device="cuda")
        found = torch.batch_norm_backward_reduce(x, x, figure, figure, None, False, False, True)
        assert found[:3] == (None, None, None)
        assert found[3].tolist() == [2, 2, 2]


def test_each_is_one_kernel_and_holds_its_results():
    with virtualgpu.gpus(1):
        x = torch.randn(64, 128, 8, 8, device="cuda")
        before = torch.cuda.memory_allocated()
        with virtualgpu.recording() as spans:
            mean, _invstd = torch.batch_norm_stats(x, EPS)
        assert [span.name for span in spans] == ["batch_norm_stats"]
        assert torch.cuda.memory_allocated() - before == 2 * 512
        assert mean.device == x.device


def test_the_same_in_a_dry_run():
    def run():
        x = torch.randn(4, 6, 5, device="cuda")
        mean, invstd = torch.batch_norm_stats(x, EPS)
        both = [torch.stack([figure, figure]) for figure in (mean, invstd)]
        counts = torch.full((2,), 20.0, device="cuda")
        mean, invstd = torch.batch_norm_gather_stats_with_counts(x, *both, None, None, 0.1, EPS, counts)
        out = torch.batch_norm_elemt(x, None, None, mean, invstd, EPS)
        sums = torch.batch_norm_backward_reduce(out, x, mean, invstd, None, True, True, True)
        back = torch.batch_norm_backward_elemt(out, x, mean, invstd, None, *sums[:2], counts.int())
        made = [mean, invstd, out, *sums, back]
        return [(t.shape, t.dtype, t.device) for t in made], torch.cuda.memory_allocated()

    with virtualgpu.gpus(1):
        real = run()
        with virtualgpu.dry_run():
            assert run() == real


def test_a_product_in_single_precision_of_tensors_in_half():
    with virtualgpu.gpus(1):
        a, b = (torch.full((64, 64), 40.0, device="cuda", dtype=torch.float16) for _ in range(2))
        assert torch.mm(a, b).isinf().all()
        assert torch.equal(torch.mm(a, b, out_dtype=torch.float32).cpu(), torch.full((64, 64), 102400.0))
        added = torch.ones(64, 64, device="cuda", dtype=torch.float16)
        assert torch.addmm(added, a, b, beta=2, out_dtype=torch.float32)[0, 0].item() == 102402.0


def test_on_the_cpu_they_are_refused_as_pytorch_does():
    with virtualgpu.gpus(1), pytest.raises(NotImplementedError, match="Could not run 'aten::batch_norm_stats'"):
        torch.batch_norm_stats(torch.ones(2, 3), EPS)
    with pytest.raises(NotImplementedError, match="Could not run 'aten::batch_norm_stats'"):
        torch.batch_norm_stats(torch.ones(2, 3), EPS)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_batch_norm_of_half_weights_with_single_running_figures(gpus, half):
    """As FSDP's mixed precision has it: CUDA takes that, though not in the backward of pictures in rows."""

    def step(x, weights, dry):
        norm = (nn.BatchNorm1d if x.dim() == 2 else nn.BatchNorm2d)(4, device="cuda")
        norm.weight, norm.bias = (nn.Parameter(p.detach().to(weights)) for p in (norm.weight, norm.bias))
        x = x.to("cuda", half).requires_grad_()
        before = torch.cuda.memory_allocated()
        out = norm(x)
        made = torch.cuda.memory_allocated() - before
        (out * out).sum().backward()
        assert (out.dtype, x.grad.dtype, norm.weight.grad.dtype) == (half, half, weights)
        return made, out if dry else (out.tolist(), x.grad.tolist(), norm.running_mean.tolist())

    torch.manual_seed(0)
    rows, pictures = torch.randn(6, 4), torch.randn(3, 4, 5, 5)
    for x in (rows, pictures.to(memory_format=torch.channels_last)):
        assert step(x, half, False) == step(x, torch.float32, False)
    with pytest.raises(RuntimeError, match="Expected running_mean to have type"):
        step(pictures, half, False)
    made, _ = step(rows, half, False)
    with virtualgpu.dry_run():
        assert step(torch.empty(6, 4), half, True)[0] == made


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(4),
        lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        lambda: nn.InstanceNorm2d(4),
    ],
)
def test_batch_norm_of_a_half_model_reckons_in_single_precision(gpus, half, training, norm):
    """As a GPU: mean and deviation are not rounded, so that results are those of single precision, rounded once."""
    torch.manual_seed(0)
    single, model = norm().train(training), norm().to("cuda", half).train(training)
    x = torch.randn(3, 4, 5, 5).to(half)
    exact, there = x.float().requires_grad_(), x.cuda().requires_grad_()
    expected, found = single(exact), model(there)
    assert found.device.type == "cuda" and torch.equal(found.cpu(), expected.to(half))
    slope = torch.randn(3, 4, 5, 5).to(half)
    expected.backward(slope.float())
    found.backward(slope.cuda())
    assert torch.equal(there.grad.cpu(), exact.grad.to(half))
    for ours, theirs in zip(model.buffers(), single.buffers(), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(
            ours.cpu(), theirs.to(ours.dtype), rtol=0.02, atol=0.001
        )  # instance norm: means of rounded ones
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad.to(half), rtol=0.02, atol=0.1)  # sums of rounded ones
    mean = torch.native_batch_norm(there, None, None, None, None, True, 0.1, 1e-5)[1]
    assert mean.is_cuda and mean.dtype is torch.float32
