"""What kernels take for themselves. All figures are those of one H100, PyTorch 2.11, 2026-11-26: bytes after, and at the peak."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu

SIDE = 4096


@pytest.fixture
def h100():
    with virtualgpu.dry_run(1, like="H100"):
        yield


def new(*shape, dtype=torch.float32, learns=True):
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(learns)


def used(function):
    """(its result, [bytes allocated after it, at the peak])"""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    return result, [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]


def used_backward(out, leaves):
    gradient = torch.ones_like(out).detach()
    return used(lambda: torch.autograd.grad(out, leaves, gradient))[1]


REDUCTIONS = {
    "sum of all": (lambda x: x.sum(), 512, 3584),
    "sum of rows": (lambda x: x.sum(1), 16384, 16384),
    "sum of columns": (lambda x: x.sum(0), 16384, 134234624),
    "mean of columns": (lambda x: x.mean(0), 16384, 134234624),
    "norm of rows": (lambda x: x.norm(dim=1), 16384, 16384),
    "norm of columns": (lambda x: x.norm(dim=0), 16384, 134234624),
    "largest of columns": (lambda x: x.max(0), 49152, 536920576),
    "where it is, of all": (lambda x: x.argmax(), 512, 9728),
    "deviation of columns": (lambda x: x.std(0), 16384, 536887808),
    "deviation of all": (lambda x: x.std(), 512, 9728),
    "both ends of all": (lambda x: x.aminmax(), 1024, 6144),
    "any of columns": (lambda x: x.any(0), 4096, 134222336),
    "any of a mask": (lambda x: x.isnan().any(), 512, 512 + 16777216 + 512 * 3),
    "how many are not zero": (lambda x: x.count_nonzero(), 512, 151000576),
    "how many in columns": (lambda x: x.count_nonzero(0), 32768, 419463680),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_that_blocks_share(h100, name):
    function, after, peak = REDUCTIONS[name]
    x = new(SIDE, SIDE, learns=False)
    bytes_used = used(lambda: function(x))[1]
    if name == "any of a mask":  # 16,779,264 there, where 512 fewer fit into blocks
        assert bytes_used[1] == pytest.approx(16779264, abs=1024)
    else:
        assert bytes_used == [after, peak]


def test_the_gradient_of_a_bias_is_added_up_in_parts(h100, monkeypatch):
    for name, none in (
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("CUBLASLT_WORKSPACE_SIZE", "0"),
    ):  # there it had its own already
        monkeypatch.setenv(name, none)
    x, layer = new(2048, 1024), nn.Linear(1024, 4096).cuda()
    out = layer(x)
    assert used_backward(out, [x, *layer.parameters()]) == [25182208, 92291584]


def test_a_card_with_fewer_processors_has_fewer_parts():
    with virtualgpu.dry_run(1, like="T4"):
        x = new(SIDE, SIDE, learns=False)
        assert (
            used(lambda: x.sum())[1][1] == 512 + 512 + 512
        )  # 40 processors with 2 blocks, 4 bytes each, and a counter


LOSSES = {
    "huber": (F.huber_loss, {}, 67112448),
    "huber, sum": (F.huber_loss, {"reduction": "sum"}, 67112448),
    "huber, each": (F.huber_loss, {"reduction": "none"}, 67108864),
    "with logits": (F.binary_cross_entropy_with_logits, {}, 134221312),
    "with logits, each": (F.binary_cross_entropy_with_logits, {"reduction": "none"}, 134217728),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_each_entry_first(h100, name):
    loss, options, peak = LOSSES[name]
    x, y = new(SIDE, SIDE), new(SIDE, SIDE, learns=False)
    assert used(lambda: loss(x, y, **options))[1][1] == peak


def test_softmax(h100):
    x = new(SIDE, SIDE)
    out, there = used(lambda: x.softmax(0))
    assert there == [67108864, 67108864]
    assert used_backward(out, [x]) == [67108864, 134217728]
    assert used(lambda: x.T.softmax(-1))[1] == [67108864, 134217728]


def test_an_embedding_sorts_its_indices(h100):
    """The peak: in bfloat16, where no other pass was in the way, 102.407 MiB."""
    weight = new(32000, 512, dtype=torch.bfloat16)
    many = torch.zeros(64, 512, dtype=torch.int64, device="cuda")
    assert used_backward(F.embedding(many, weight), [weight])[1] == pytest.approx(102.407 * 2**20, rel=0.001)
    few = torch.zeros(4, 64, dtype=torch.int64, device="cuda")
    assert used_backward(F.embedding(few, weight), [weight])[1] <= 2**25


def test_an_embedding_bag_sorts_its_indices(h100):
    """As an embedding does, with the places before sorting beside (EmbeddingBag.cu); few of them, too."""
    weight = new(32000, 512)
    for count in (64 * 512, 16):
        indices = torch.zeros(count, dtype=torch.int64, device="cuda")
        bags = torch.arange(0, count, 4, device="cuda")
        _, bag = used_backward(F.embedding_bag(indices, weight, bags, mode="sum"), [weight])
        _, single = used_backward(F.embedding(indices, weight), [weight])
        sums = (-(-count // 10) + count) * 512 * 4
        assert bag >= 32000 * 512 * 4 + sums and (count == 16 or bag - single == pytest.approx(8 * count, abs=1 << 20))


def test_sort(h100):
    assert used(lambda: new(1 << 20, learns=False).sort())[1][1] - (4 << 20) == pytest.approx(33763840, abs=1024)
    rows = new(1024, 1024, learns=False)
    assert used(lambda: rows.sort(-1))[1] == [12582912, 12591104]


@pytest.mark.parametrize(
    ("dtype", "peak"), [(torch.float32, 25838080), (torch.float16, 19341824), (torch.bfloat16, 19341824)]
)
def test_a_convolution_lays_pictures_out_anew(h100, dtype, peak):
    layer, x = nn.Conv2d(64, 64, 3, padding=1).to("cuda", dtype), new(16, 64, 56, 56, dtype=dtype)
    out, there = used(lambda: layer(x))
    assert there[1] == peak
    # 27,902,464 bytes for the weights' gradient there, beside both gradients
    backward = used_backward(out, [x, *layer.parameters()])
    assert backward[1] == pytest.approx({4: 40895488, 2: 21332992}[x.itemsize], rel=0.01)


@pytest.mark.parametrize("layer", [nn.Conv2d(64, 256, 1), nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 64, 4, 4)])
def test_a_convolution_that_lays_out_nothing(h100, layer):
    layer, x = nn.Conv2d(**conv_of(layer)).cuda(), new(16, 64, 56, 56)
    assert len(set(used(lambda: layer(x))[1])) == 1


def conv_of(layer):
    """Its settings: what was made outside has numbers."""
    return {name: getattr(layer, name) for name in ("in_channels", "out_channels", "kernel_size", "stride", "groups")}


def test_a_full_gpu_convolves_without(h100):
    """cuDNN has kernels that need less memory; no error."""
    layer, x = nn.Conv2d(64, 64, 3, padding=1).cuda(), new(16, 64, 56, 56)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + x.nbytes + (2 << 20)) / total)
    assert layer(x).shape == x.shape


def test_log_sigmoid_keeps_nothing(h100):
    x = new(SIDE, SIDE)
    out, there = used(lambda: F.logsigmoid(x))
    assert there == [67108864, 67108864]
    assert used_backward(out, [x]) == [67108864, 67108864]


def test_attention_on_cudnn(h100):
    q, k, v = (new(4, 8, 512, 64, dtype=torch.float16) for _ in range(3))
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v)
    there = used_backward(out, [q, k, v])
    assert there[1] == 10551296  # 6 MiB of gradients; of each row, 64 numbers and their sum


def test_a_layer_norm_copies_what_does_not_lie_close(h100):
    """A ViT's residual lies as its attention's result does, transposed: five such copies a block in a profile of an H100."""
    x, weight = new(64, 128, 512), new(512)
    whole = x.nbytes
    (_, plain), (out, copied) = (
        used(lambda: F.layer_norm(x, (512,), weight)),
        used(lambda: F.layer_norm(x.mT.contiguous().mT, (512,), weight)),
    )
    assert copied[1] - copied[0] == plain[1] - plain[0] + whole
    assert used_backward(out, [x])[1] == used_backward(F.layer_norm(x, (512,), weight), [x])[1] + whole


def test_the_gradient_of_ctc_loss_is_copied_for_log_softmax(h100):
    """It lies by steps, as LossCTC.cu makes it, however the scores lie; so the derivative of a log_softmax by sequences copies it first
    (SoftMax.cu). A conformer on an H100, PyTorch 2.11, showed it."""
    x, targets = new(16, 400, 1000), torch.ones(16, 40, dtype=torch.int64, device="cuda")
    peaks = []
    for by_steps in (False, True):
        scores = x.transpose(0, 1).contiguous().log_softmax(-1) if by_steps else x.log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, targets, (400,) * 16, (40,) * 16)
        (gradient,) = torch.autograd.grad(loss, scores, retain_graph=True)
        assert gradient.is_contiguous()
        del gradient
        peaks.append(used_backward(loss, [scores if by_steps else x])[1])
    gradient, sums = (
        x.nbytes,
        16 * 400 * 81 * 4,
    )  # sums from the beginning, which are given back after the first, or from the end
    assert peaks == [pytest.approx(size, rel=0.002) for size in (3 * gradient - sums, gradient + sums)]


def test_that_copy_takes_time(h100):
    x, clock = new(4096, 4096, learns=False), virtualgpu.machine().clock

    def kernels(tensor):
        before = clock.computing[0]
        F.layer_norm(tensor, (4096,))
        return clock.computing[0] - before

    apart = x.t()
    assert kernels(apart) > kernels(x) + 0.9 * 2 * x.nbytes / 3.35e12
