# ruff: noqa: F403, F405
"""Operations that PyTorch has for CUDA alone: SyncBatchNorm's, products with a dtype of their own, histograms of whole numbers."""

import pytest

from tests.virtualgpu.engine.tools import *

EPS = 1e-5
ROWS = 3, 5  # on each of two GPUs


@pytest.mark.parametrize(("kind", "near"), [(SINGLE, 1e-5), (HALF, 2e-3)])
def test_synchronized_batch_norm_on_two_gpus_is_batch_norm_of_all_rows(gpus, kind, near):
    torch.manual_seed(0)
    x = torch.randn(sum(ROWS), 4, 3, 2).to(kind)
    dy, weight, bias = torch.randn_like(x), torch.rand(4), torch.rand(4)
    means, variances = torch.zeros(4), torch.ones(4)
    exact, w, b = x.float().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    y = F.batch_norm(exact, means, variances, w, b, training=True, momentum=0.1, eps=EPS)
    y.backward(dy.float())

    # what SyncBatchNorm does
    ranks = [
        (part.cuda(gpu), slope.cuda(gpu))
        for gpu, (part, slope) in enumerate(zip(x.split(ROWS), dy.split(ROWS), strict=True))
    ]
    statistics = [torch.batch_norm_stats(part, EPS) for part, _ in ranks]
    assert all(figure.dtype is SINGLE for pair in statistics for figure in pair)
    counts = torch.tensor([part.numel() / 4 for part, _ in ranks])
    outs, arguments, sums = [], [], []
    for gpu, (part, slope) in enumerate(ranks):
        mean, invstd = (torch.stack([pair[at].cuda(gpu) for pair in statistics]) for at in (0, 1))
        running = torch.zeros(4).cuda(gpu), torch.ones(4).cuda(gpu)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            part, mean, invstd, *running, 0.1, EPS, counts.cuda(gpu)
        )
        outs.append(torch.batch_norm_elemt(part, weight.cuda(gpu), bias.cuda(gpu), mean, invstd, EPS).cpu())
        arguments.append((slope, part, mean, invstd, weight.cuda(gpu)))
        sums.append(torch.batch_norm_backward_reduce(*arguments[-1], True, True, True))
    total = [sum(each[at].cpu() for each in sums) for at in range(4)]
    slopes = [
        torch.batch_norm_backward_elemt(*each, total[0].cuda(gpu), total[1].cuda(gpu), counts.int().cuda(gpu))
        for gpu, each in enumerate(arguments)
    ]
    assert [slope.device.index for slope in slopes] == [0, 1] and outs[0].dtype is slopes[0].dtype is kind
    found = [
        torch.cat(outs),
        torch.cat([slope.cpu() for slope in slopes]),
        *total[2:],
        *(figure.cpu() for figure in running),
    ]
    for one, other in zip(found, (y.detach(), exact.grad, w.grad, b.grad, means, variances), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=near, atol=near)


def test_one_count_for_all(gpus):
    mean, invstd = torch.tensor([[0.0], [2.0]], device="cuda"), torch.full((2, 1), 0.5, device="cuda")
    running = ones(1), torch.full((1,), 3.0, device="cuda")
    found = torch.batch_norm_gather_stats(torch.empty(4, 1, device="cuda"), mean, invstd, *running, 0.5, 0.0, 2)
    assert found[0].item() == running[0].item() == 1.0
    assert found[1].item() == pytest.approx(5**-0.5)  # variances of 4 each, and the means 1 from the middle
    assert running[1].item() == pytest.approx(0.5 * 3 + 0.5 * 5 * 4 / 3)
    x, figure = ones(2, 3), ones(3)
    found = torch.batch_norm_backward_reduce(x, x, figure, figure, None, False, False, True)
    assert found[:3] == (None, None, None) and found[3].tolist() == [2, 2, 2]


def test_each_is_one_kernel_and_holds_its_results_also_in_a_dry_run(gpus):
    x = rand(64, 128, 8, 8, learns=False)
    before = torch.cuda.memory_allocated()
    with virtualgpu.recording() as spans:
        mean, _invstd = torch.batch_norm_stats(x, EPS)
    assert [span.name for span in spans] == ["batch_norm_stats"] and mean.device == x.device
    assert torch.cuda.memory_allocated() - before == 2 * 512

    def run():
        x = rand(4, 6, 5, learns=False)
        both = [torch.stack([figure, figure]) for figure in torch.batch_norm_stats(x, EPS)]
        counts = torch.full((2,), 20.0, device="cuda")
        mean, invstd = torch.batch_norm_gather_stats_with_counts(x, *both, None, None, 0.1, EPS, counts)
        out = torch.batch_norm_elemt(x, None, None, mean, invstd, EPS)
        sums = torch.batch_norm_backward_reduce(out, x, mean, invstd, None, True, True, True)
        back = torch.batch_norm_backward_elemt(out, x, mean, invstd, None, *sums[:2], counts.int())
        return [mean, invstd, out, *sums, back]

    same_when_dry(run)


def test_a_product_in_single_precision_of_tensors_in_half(gpus):
    a = halves(64, 64) * 40
    assert torch.mm(a, a).isinf().all()
    assert torch.equal(torch.mm(a, a, out_dtype=SINGLE).cpu(), torch.full((64, 64), 102400.0))
    assert torch.addmm(halves(64, 64), a, a, beta=2, out_dtype=SINGLE)[0, 0].item() == 102402.0


def test_on_the_cpu_they_are_refused_as_pytorch_does():
    refused = pytest.raises(NotImplementedError, match="Could not run 'aten::batch_norm_stats'")
    with virtualgpu.gpus(1), refused:
        torch.batch_norm_stats(torch.ones(2, 3), EPS)
    with refused:
        torch.batch_norm_stats(torch.ones(2, 3), EPS)


@pytest.mark.parametrize("kind", [BYTE, torch.int8, torch.int16, INT, LONG])
def test_whole_numbers_are_counted_as_floating_point_ones_are_on_the_cpu(gpus, kind):
    numbers = torch.tensor([[0, 1, 1, 3, 4], [7, 7, 2, 8, 9]])
    for arguments in ({"bins": 8, "min": 0, "max": 7}, {"bins": 4, "min": 1, "max": 9}, {"bins": 3}):
        counts = torch.histc(numbers.to("cuda", kind), **arguments)
        assert counts.is_cuda and counts.dtype is kind
        assert counts.tolist() == torch.histc(numbers.double(), **arguments).tolist()


def test_experts_count_their_tokens_into_a_given_tensor(gpus):
    experts = torch.tensor([2, 0, 2, 3], dtype=INT, device="cuda")
    counts = experts.new_empty(0)
    assert torch.histc(experts, bins=4, min=0, max=3, out=counts) is counts and counts.tolist() == [1, 0, 2, 1]
    assert torch.histc(experts[:1], bins=2).tolist() == [0, 1]  # one number alone: from 1 to 3
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(experts, bins=4, min=3, max=1)
    with pytest.raises(RuntimeError, match="not implemented for 'Int'"):
        torch.histc(experts.cpu(), bins=4)
    with virtualgpu.dry_run():
        counts = torch.histc(whole(5, dtype=INT), bins=4, min=0, max=3)
        assert counts.dtype is INT and counts.is_cuda and counts.tolist() == [5, 0, 0, 0]  # known in a dry run, too
