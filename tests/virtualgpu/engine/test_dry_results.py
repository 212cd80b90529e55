# ruff: noqa: F403, F405
"""A dry run's results are those of a run with numbers: storages, types, layouts, bytes and seconds; and what it remembers holds again."""

import gc
import weakref

import pytest
from torch import Tensor, func, optim
from torch.autograd import forward_ad
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

from tests.virtualgpu.engine.tools import *
from virtualgpu import _compat
from virtualgpu.engine import dry_run
from virtualgpu.engine.dry_run import DryRun

LOSSES = [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.huber_loss, F.l1_loss, F.kl_div]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("types", [(SINGLE, SINGLE), (HALF, HALF), (SINGLE, HALF), (HALF, SINGLE)])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss, types, reduction):
    def step():
        x, target = (torch.rand(40, 50, device="cuda").to(dtype) for dtype in types)
        value = loss(x.requires_grad_(), target, reduction=reduction)
        value.sum().backward()
        return value, x.grad

    refusing = [F.binary_cross_entropy, F.huber_loss]  # huber's backward pass
    if _compat.KEEPS_WORKSPACES:  # before PyTorch 2.15
        refusing.append(F.mse_loss)
    if loss in refusing and types[0] is not types[1]:
        for run in MODES:
            with run(1), pytest.raises(RuntimeError, match="Found dtype"):
                step()
        return
    results, _ = same_when_dry(step, "A100")
    if loss in LOSSES[:4] and reduction != "none":  # the loss of each number was worked out in its memory
        assert results[0][-1] == 2000 * results[0][0].itemsize


NORMS = {"frozen": (F.batch_norm, False), "training": (F.batch_norm, True), "groups": (F.group_norm, None)}
TYPES = [(SINGLE, SINGLE), (HALF, SINGLE), (HALF, HALF), (BRAIN, SINGLE)]
CASES = [(kind, types, last) for kind in NORMS for types in TYPES for last in (True, False)]
# weights of another type are refused for groups; mixed with running figures, half batch norm of rows is; and before PyTorch 2.15 CUDA
# made inputs of groups contiguous, as a dry run does
CASES = [
    (kind, types, last)
    for kind, types, last in CASES
    if not (kind == "groups" and (types[0] is not types[1] or (last and _compat.KEEPS_WORKSPACES)))
    and not (kind != "groups" and types == (HALF, HALF) and not last)
]


@pytest.mark.parametrize("kind, types, last", CASES)
def test_norms(kind, types, last):
    norm, training = NORMS[kind]

    def step():
        x = torch.rand(8, 6, 10, 10, device="cuda").to(types[0])
        x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
        weight, bias = (ones(6, dtype=types[1], learns=True) for _ in range(2))
        out = norm(x, 2, weight, bias) if kind == "groups" else norm(x, ones(6), ones(6), weight, bias, training)
        gradient, *others = torch.autograd.grad(out.float().sum(), [x, weight, bias])
        if kind == "frozen" and last:  # its result has channels last, its gradient is contiguous
            assert gradient.is_contiguous() and not out.is_contiguous()
        return out, gradient, *others

    same_when_dry(step, "A100")


# Is what comes of channels last contiguous? As CUDA's kernels have it; with numbers, too, whose kernels are the CPU's
LAYOUTS = table("""
    F.pixel_shuffle(x, 2) | contiguous
    F.pixel_unshuffle(x, 2) | contiguous
    F.channel_shuffle(x, 2) | contiguous
    F.pad(x, (1, 1, 1, 1), mode="reflect") | contiguous
    F.pad(x, (1, 1, 1, 1), mode="replicate") | contiguous
    x.roll(1, 1) | contiguous
    F.pad(x, (1, 1, 1, 1)) | channels last
    F.glu(x, 1) | channels last
    F.interpolate(x, scale_factor=2) | channels last
    F.max_pool2d(x, 2) | channels last
""")


@pytest.mark.parametrize("call, layout", LAYOUTS)
def test_layouts_are_cudas(call, layout):
    picture = torch.arange(2 * 8 * 4 * 4.0).view(2, 8, 4, 4).to(memory_format=torch.channels_last)

    def function(x):
        return eval(call, globals(), {"x": x})

    def step():
        x = torch.rand(2, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        out = function(x)
        out.square().sum().backward()
        return out, x.grad

    (_, _, stride, *_), _gradient = same_when_dry(step, "A100")[0]
    assert (stride[1] == 1) is (layout == "channels last")
    with virtualgpu.gpus(1):
        assert torch.equal(function(picture.cuda()).cpu(), function(picture))


RATES = {
    "a number": lambda: 0.1,
    "the host's": lambda: torch.tensor(0.1),
    "the GPU's": lambda: torch.tensor(0.1, device="cuda"),
}
OPTIMIZERS = [(optim.SGD, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adam, {}), (optim.AdamW, {"amsgrad": True})]
if not _compat.KEEPS_WORKSPACES:  # before PyTorch 2.15 Adagrad had no fused kernel for CUDA
    OPTIMIZERS.append((optim.Adagrad, {}))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_fused_optimizers_with_a_scaler(kind, options, rate):
    def step():
        model = nn.Linear(40, 50, device="cuda")
        optimizer = kind(model.parameters(), lr=RATES[rate](), fused=True, **options)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            with torch.autocast("cuda"):
                loss = model(ones(8, 40)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return ()

    same_when_dry(step)


LENGTHS = table("""
    rnn.pack_padded_sequence(x, [5, 3, 2])
    rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
    rnn.pack_padded_sequence(x, [3, 5, 2], enforce_sorted=False)
    rnn.pack_sequence([x[:3, 0], x[:2, 0]])
    rnn.pack_padded_sequence(x, torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]]).cuda().sum(1).cpu())
""")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("call", LENGTHS)
def test_packed_sequences(kind, call):
    lengths = []

    def step():
        model, x = kind(8, 4, num_layers=2, bidirectional=True).cuda(), torch.randn(5, 3, 8).cuda().requires_grad_()
        packed = eval(call, globals(), {"x": x})
        padded, known = rnn.pad_packed_sequence(model(packed)[0], total_length=6)
        padded.square().sum().backward()
        lengths.append((packed.batch_sizes.tolist(), known.tolist()))
        return packed.data, padded, x.grad

    same_when_dry(step)
    assert lengths[0] == lengths[1]


FAKE_QUANTIZED = table("""
    torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)
    torch.fake_quantize_per_channel_affine(x, ones(50), whole(50, dtype=INT), 1, 0, 255)
""")


@pytest.mark.parametrize("call", FAKE_QUANTIZED)
def test_rounding_as_if_quantized(call):
    def step():
        out = eval(call, globals(), {"x": (x := ones(40, 50, learns=True))})
        out.sum().backward()
        return out, x.grad

    same_when_dry(step)


LABELS = [3, -100, 1, 3, -100, 0]
# x: numbers that no dry run knows; y: labels on a GPU, which the host wrote
SIZED = table("""
    x[y != -100]
    x.reshape(2, 3, 8)[:, y[:3] >= 0]
    x[y > 0, y[y > 0]]
    x[y.cpu() > 0]
    x.view(2, 3, 8)[y.view(2, 3) > 0]
    x.T[:, None, y > 0]
    torch.autograd.grad(x.requires_grad_()[y > 0].sum(), x)[0]
    F.cross_entropy(x[y >= 0], y[y >= 0])
    x.index_put_((y > 0,), x[y > 0] * 2)
    x.masked_select(y[:, None] > 0)
    x[0, 0].masked_select(y[0] > 0)
    x[y[0] > 0]
    x.index_select(0, (y > 0).nonzero().squeeze(1))
    torch.where(y.view(2, 3) > 0)[1]
    torch.argwhere(y > 0)
    torch.unique(y, return_inverse=True, return_counts=True)[2]
    torch.unique_consecutive(y)
    y.clamp(0).bincount()
    x.repeat_interleave(y.clamp(0), 0)
    F.one_hot(y.clamp(0))
    torch.nonzero(y > 0, out=torch.empty(0, dtype=LONG, device="cuda"))
    torch.masked_select(y, y > 0, out=torch.zeros_like(y))
    x[y > 100]
    ctc(x, [6], [3])
    ctc(x.cpu(), torch.tensor([6]), torch.tensor([3]))
    ctc(x, torch.tensor([6]).cuda(), (y > 0).sum()[None])
""")


def ctc(x, input_lengths, target_lengths):
    """The gradient of the loss of six steps, of which a target of three digits is to be read."""
    x.requires_grad_()
    targets = torch.tensor([[1, 2, 3]], device=x.device)
    F.ctc_loss(x[:, None].log_softmax(2), targets, input_lengths, target_lengths).backward()
    return x.grad


@pytest.mark.parametrize("call", SIZED)
def test_a_shape_that_depends_on_known_values(call):
    """And what comes of whole numbers is known as well."""
    numbers = []

    def step():
        out = eval(call, globals(), {"x": rand(6, 8, learns=False), "y": torch.tensor(LABELS).cuda()}).detach()
        numbers.append(None if out.is_floating_point() else out.tolist())
        return [out]

    same_when_dry(step)
    assert numbers[0] == numbers[1]


# -- what a dry run remembers of one operation is right for the next that is like it


@pytest.fixture
def forgetful(monkeypatch, gpus):
    """Nothing is remembered yet."""
    monkeypatch.setattr(DryRun, "recipes", {})


def test_a_folded_tensor_keeps_the_memory_of_its_columns(forgetful):
    """CUDA's kernel makes it as large as its input, and leaves it so (Col2Im.cu): twice, since the second is remembered."""
    for run in MODES:
        with run(1):
            columns = ones(2, 27, 196)
            assert [used(lambda columns=columns: F.fold(columns, (16, 16), 3))[1][0] for _ in range(2)] == [42496] * 2


NUMBERS = (True, 1, 1.0, 1 + 0j)  # equal to Python
OF_A_NUMBER = ["x * number", "x + number", "x**number", "torch.where(x.bool(), number, 0)", "x.int().clamp(number)"]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("call", OF_A_NUMBER)
def test_numbers_that_are_equal_and_of_another_type(forgetful, call, order):
    def types(forget: bool) -> list:
        found = []
        for number in NUMBERS[::order]:
            for dtype in (BOOL, LONG, SINGLE):
                if forget:
                    DryRun.recipes.clear()
                with contextlib.suppress(RuntimeError):  # not of a bool
                    result = eval(call, globals(), {"x": ones(100, dtype=dtype), "number": number})
                    found.append((number, dtype, result.dtype, result.nbytes))
        return found

    with virtualgpu.dry_run():
        expected = types(forget=True)
        DryRun.recipes.clear()
        assert types(forget=False) == expected


def test_generators_are_not_kept(forgetful):
    with virtualgpu.dry_run():
        kept = []
        for seed in range(20):
            generator = torch.Generator("cuda").manual_seed(seed)
            torch.empty(8, device="cuda").uniform_(generator=generator)
            kept.append(weakref.ref(generator))
            if not seed:
                remembered = len(DryRun.recipes)
        assert len(DryRun.recipes) == remembered
        del generator
        gc.collect()
        assert not any(reference() for reference in kept)


def test_the_crosscheck_finds_what_a_key_lacks(forgetful, monkeypatch):
    """True, 1 and 1.0 in one key, as it once was."""

    def describe(values, key):
        for value in values:
            if isinstance(value, Tensor):
                key += (value.dtype, value.shape, value.stride())
            elif isinstance(value, (list, tuple)):
                describe(value, key)
            else:
                key.append(value)

    monkeypatch.setattr(dry_run, "_describe", describe)
    monkeypatch.setenv("VIRTUALGPU_CROSSCHECK", "1")
    virtualgpu.gpus(1)
    with virtualgpu.dry_run():
        mask = ones(1000, dtype=BOOL)
        assert (mask * True).dtype is BOOL
        with pytest.raises(RuntimeError, match=r"remembered .*torch.bool.* of aten.mul.Tensor and finds .*torch.int64"):
            mask * 1


@pytest.mark.parametrize("wrong", [((8,), (2,), SINGLE), ((8,), (1,), DOUBLE), ((4, 2), (2, 1), SINGLE)])
def test_the_crosscheck_compares_strides_and_types(forgetful, monkeypatch, wrong):
    monkeypatch.setenv("VIRTUALGPU_CROSSCHECK", "1")
    virtualgpu.gpus(1)
    with virtualgpu.dry_run():
        x = ones(8)
        x.sin()
        x.sin()
        (key,) = [key for key in DryRun.recipes if key[0].name == "sin"]
        DryRun.recipes[key] = lambda args: dry_run._empty(*wrong)
        with pytest.raises(RuntimeError, match="a dry run remembered"):
            x.sin()


def dual(f, y):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(y, torch.ones_like(y)))).tangent


FORWARD = {
    "jvp": lambda f, y: func.jvp(f, (y,), (y,)),
    "jacfwd": lambda f, y: func.jacfwd(f)(y),
    "hessian": lambda f, y: func.hessian(lambda y: f(y).sum())(y),
    "dual": dual,
    "vmap": lambda f, y: func.vmap(func.jvp, in_dims=(None, 0, 0))(f, (y.expand(3, 8),), (y.expand(3, 8),)),
}


@pytest.mark.parametrize("f", [torch.sin, lambda x: (x * x).exp(), lambda x: x.view(2, 4) @ x.view(4, 2)])
@pytest.mark.parametrize("how", FORWARD.values(), ids=FORWARD)
def test_forward_mode(forgetful, how, f):
    """Some of its operations answer yes or no (_has_same_storage_numel), which is no shape to remember."""

    def shapes():
        out = tree_leaves(how(f, torch.arange(8.0, device="cuda")))
        return [(tuple(t.shape), t.dtype, t.device) for t in out]

    expected = shapes()
    with virtualgpu.dry_run():
        assert shapes() == shapes() == expected


def test_linearize_is_refused(forgetful):
    """It would fold all of it, tangents too, and give what was on the CPU."""
    y = torch.arange(8.0, device="cuda")
    assert func.linearize(torch.sin, y)[1](y).device.type == "cuda"
    with virtualgpu.dry_run(), pytest.raises(NotImplementedError, match=r"linearize .* Use torch.func.jvp"):
        func.linearize(torch.sin, y)
