"""autocast("cuda"): CUDA's lists against PyTorch's own, operations and a model, where it is on, its cache of weights, the scaler."""

import contextlib
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import virtualgpu
from tests.virtualgpu.rounded import RoundedProducts
from virtualgpu.torch_api import autocast as lists

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def gpus(pytorchs):
    torch.manual_seed(0)
    virtualgpu.gpus(2, like="A100")
    yield virtualgpu.machine()
    virtualgpu.reset()
    assert not torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is F16


def kinds(value) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def equal(left, right) -> bool:
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(a.dtype is b.dtype and torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num()) for a, b in pairs)


class Seen(TorchDispatchMode):
    """The operations that pass, by name, and the dtype of each cast among them."""

    def __init__(self):
        super().__init__()
        self.names, self.casts = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name.removeprefix("aten::"))
        if self.names[-1] == "_to_copy":
            self.casts.append(out.dtype)
        return out


# -- the lists


def test_lists_name_what_pytorch_casts():
    ours = [*lists.LOWER_PRECISION_FP, *lists.FP32, *lists.FP32_SET_OPT_DTYPE, *lists.FP32_APPEND_DTYPE, *lists.PROMOTE]
    ours += [*lists.BANNED, *lists.CUDNN_RNN]
    assert len(ours) == len(set(ours))
    theirs = lists.registered("AutocastCUDA")
    assert theirs - set(ours) == set() and len(theirs) > 110
    later = {"linalg_matrix_sqrth", "rms_norm", "_cudnn_rnn"}  # of some versions, or of CUDA wheels alone
    assert {name for name in set(ours) - theirs if "imname" not in name and "names" not in name} <= later


def test_each_list_is_that_of_pytorchs_header():
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.exists():
        pytest.skip("this PyTorch comes without its headers")
    text = header.read_text()
    for name in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        body = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*)", text)[1]
        theirs = {".".join(re.findall(r"\w+", entry)) for entry in re.findall(r" _\(([^)]*)\)", body)}
        assert len(theirs) > 10 and theirs <= set(getattr(lists, name)), name
    assert set(re.findall(r'"(norm\.\w+)"', text)) <= set(lists.FP32_APPEND_DTYPE)


# -- each operation of PyTorch's own test of autocast, and a model


def operations() -> list[tuple]:
    """(list, name, function, args, kwargs), on the CPU."""
    torch.manual_seed(0)
    theirs, rows = AutocastTestLists("cpu"), []
    for name, owner in {
        "torch_fp16": torch,
        "torch_fp32": torch,
        "torch_need_autocast_promote": torch,
        "nn_fp16": torch._C._nn,
        "nn_fp32": torch._C._nn,
        "linalg_fp16": torch._C._linalg,
    }.items():
        for op, args, *rest in getattr(theirs, name):
            if op != "einsum" and not op.startswith("cudnn"):  # a row that is none, and kernels that only CUDA has
                options = rest[0] if rest and isinstance(rest[0], dict) else {}
                rows.append((name, op, getattr(owner, op), args, options))
    return rows


def network():
    """A model of the kinds of layers that there are, and what it takes."""
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)]
    parts.append(nn.ConvTranspose2d(8, 8, 2))
    rest = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), nn.PReLU(), nn.Linear(16, 4), nn.Softplus()
    return nn.Sequential(*parts, nn.Flatten(2), *rest, nn.GELU(), nn.LogSoftmax(2)), torch.rand(2, 3, 8, 8)


def dtypes_in(model, x) -> list:
    """The dtypes that each module gives, in order."""
    found = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, _, out, name=name: found.append((name, kinds(out))))
    model(x)
    return found


@pytest.fixture(scope="module")
def pytorchs():
    """What PyTorch's own kernels for AutocastCUDA give, on fake tensors that say they are CUDA's: {(index, name): (dtypes of results, of
    casts)} of operations, {dtype: dtypes} of the model; None where PyTorch asks the driver, which is not there."""

    def as_pytorch_does(program, dtype=F16):
        try:
            with FakeTensorMode():
                torch.set_autocast_enabled("cuda", True)
                torch.set_autocast_dtype("cuda", dtype)
                return program()
        except (RuntimeError, AssertionError) as error:
            if not re.search("driver|not linked|not compiled|from the 'CUDA' backend", str(error)):
                raise
            return None
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", F16)

    def fake(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    def of_operation(function, args, options):
        args = tree_map_only(torch.Tensor, fake, args)
        with Seen() as seen:
            return kinds(function(*args, **options)), seen.casts

    def of_model():
        with torch.device("cuda"):
            return dtypes_in(*network())

    found = {
        (index, name): as_pytorch_does(lambda call=call: of_operation(*call))
        for index, (_, name, *call) in enumerate(operations())
    }
    # without CUDA's C++, a linear layer, fake and under autocast, may abort the process
    models = {dtype: torch.version.cuda and as_pytorch_does(of_model, dtype) for dtype in (F16, BF16)}
    return found | models


@pytest.mark.parametrize("dry", [False, True])
def test_operations_give_and_cast_as_pytorchs_own(dry, pytorchs):
    others = {"softmax", "log_softmax"}  # of other kernels: CUDA's softmax casts in itself
    wrong, compared = {}, 0
    for index, (known, name, function, args, options) in enumerate(operations()):
        if dry and name == "_convolution":  # scripts alone call it, and PyTorch 2.11 has no meta kernel for it
            continue
        with virtualgpu.dry_run() if dry else contextlib.nullcontext():
            args = tree_map_only(torch.Tensor, torch.Tensor.cuda, args)
            with Seen() as seen, torch.autocast("cuda"):
                out = kinds(function(*args, **options))
        theirs, casts = pytorchs[index, name] or (out, seen.casts)
        compared += pytorchs[index, name] is not None
        expected = F16 if known.endswith("fp16") else F32
        if {*out} != {expected} or theirs != out or (name not in others and not dry and casts != seen.casts):
            wrong[index, name] = out, theirs, seen.casts, casts
    assert wrong == {} and compared > 80


def test_what_no_list_changes():
    x, half = torch.rand(3, 3, device="cuda", dtype=F64), torch.rand(3, device="cuda", dtype=F16)
    single, n = half.float(), torch.arange(3, device="cuda")
    with torch.autocast("cuda"):
        assert kinds([half.softmax(0, dtype=F16), half.sum(dtype=F64), half.cumsum(0, dtype=F16)]) == [F16, F64, F16]
        assert kinds([x @ x, x.exp(), x.softmax(0), x.norm(), n.sum()]) == [F64] * 4 + [torch.int64]
        assert kinds([torch.cat([half, single]), torch.dot(half, half), half + 1, x + half]) == [F32, F16, F16, F64]
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
            torch.dot(half, half.to(BF16))


def test_binary_cross_entropy_is_refused_in_pytorchs_words():
    x = torch.rand(3)
    with pytest.raises(RuntimeError) as theirs:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
        torch.ops.aten.binary_cross_entropy.default.redispatch(key, x, x)
    with torch.autocast("cuda"):
        with pytest.raises(RuntimeError, match="unsafe to autocast") as ours:
            F.binary_cross_entropy(x.cuda(), x.cuda())
        assert F.binary_cross_entropy(x, x).dtype is F32  # the CPU's own is not
    assert str(ours.value) == str(theirs.value)


def test_an_operation_without_a_known_rule_is_refused(monkeypatch):
    monkeypatch.setattr(lists, "FP32", tuple(name for name in lists.FP32 if name != "exp"))
    op, _, rule = lists.rules.__wrapped__()["exp"]  # they are made once
    with pytest.raises(NotImplementedError, match=r"what autocast does to aten::exp in this version"):
        rule(op, (torch.rand(3, device="cuda"),), {})
    assert rule(op, (1,), {}) == ((1,), {})


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_modules_give_the_dtypes_of_cuda(dtype, dry, pytorchs):
    with virtualgpu.dry_run() if dry else contextlib.nullcontext():
        model, x = network()
        with torch.autocast("cuda", dtype):
            ours = dtypes_in(model.cuda(), x.cuda())
    found = dict(ours)
    assert (found["0"], found["1"], found["5"], found["12"]) == ([dtype], [dtype], [dtype], [F32])
    if not pytorchs[dtype]:
        pytest.skip("here PyTorch asks the driver even of fake tensors")
    assert ours == pytorchs[dtype]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_float16_as_cudnns(kind):
    layer, x = kind(3, 4, 2, bidirectional=True), torch.rand(5, 2, 3)
    theirs = kind(3, 4, 2, bidirectional=True)
    theirs.load_state_dict(layer.state_dict())
    expected = theirs.half()(x.half())
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
    convolution, norm, linear = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(72, 4)
    x, target = torch.rand(2, 3, 8, 8), torch.tensor([1, 2])

    def loss_of(h, h16, target):
        h = F.max_pool2d(norm(F.conv2d(h16(x), h16(convolution.weight), h16(convolution.bias))).relu(), 2)
        h = F.gelu(F.linear(h.flatten(1), h16(linear.weight), h16(linear.bias)))
        return F.nll_loss(h.log_softmax(1, dtype=F32), target)

    layers = nn.ModuleList([convolution, norm, linear])
    with RoundedProducts():
        expected = loss_of(x, torch.Tensor.half, target)
        expected.backward()
    gradients = [p.grad for p in layers.parameters()]
    norm.reset_running_stats()
    layers.zero_grad()
    layers.cuda()
    x = x.cuda()
    with torch.autocast("cuda"):
        loss = loss_of(x, lambda tensor: tensor, target.cuda())
    loss.backward()
    assert equal(loss, expected) and equal([p.grad for p in layers.parameters()], gradients)


# -- where it is on


def product(device="cuda"):
    x = torch.rand(2, 2, device=device)
    return (x @ x).dtype


def nested():
    with torch.autocast("cuda"):
        yield product()
        with torch.autocast("cuda", enabled=False):
            yield product()
            with torch.autocast("cuda", BF16):
                yield product()
            yield product()
        yield product()


def set_by_hand():
    torch.set_autocast_enabled("cuda", True)
    yield product()
    torch.set_autocast_enabled("cuda", False)
    yield product()


def in_a_thread():
    with torch.autocast("cuda"):
        found = []
        thread = threading.Thread(target=lambda: found.extend([product(), torch.autocast("cuda", BF16)(product)()]))
        thread.start()
        thread.join()
        yield from [*found, product()]


def of_both_devices():
    half, x = torch.rand(2, 2, device="cuda").half(), torch.rand(2, 2, device="cuda")
    with torch.autocast("cpu"):
        yield from [product("cpu"), product()]
        yield from kinds([torch.view_as_complex(half), F.mse_loss(half, half)])
        yield torch.view_as_complex(half.cpu()).dtype  # one of the CPU's list alone
        with torch.autocast("cuda"):
            yield from [product("cpu"), product()]
            yield from kinds([F.cross_entropy(x, x), F.cross_entropy(half, half), torch.einsum("ij,kj", x, x)])


def of_gpus_alone():
    with torch.autocast("cuda"):
        yield from [product("cpu"), product("cuda:1")]
        yield torch.pow(torch.rand(3, device="cuda", dtype=F16), torch.tensor(2.0)).dtype


def data_parallel():
    model, x = nn.DataParallel(nn.Linear(4, 4).cuda(), [0, 1]), torch.rand(4, 4, device="cuda")
    with torch.autocast("cuda"):
        yield model(x).dtype
    yield model(x).dtype


def transformed():
    x, w = torch.rand(3, 2, device="cuda"), torch.rand(2, 2, device="cuda")
    with torch.autocast("cuda"):
        yield torch.func.vmap(lambda row: w @ row)(x).dtype
        gradient = torch.func.grad(lambda w: (x @ w).float().sum())(w)
    yield gradient.dtype
    assert equal(gradient, (x.cpu().half().mT.sum(1, keepdim=True).expand(2, 2)).float())


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (nested, [F16, F32, BF16, F32, F16]),
        (set_by_hand, [F16, F32]),
        (in_a_thread, [F32, BF16, F16]),
        (of_both_devices, [BF16, F32, torch.complex32, F16, torch.complex64, BF16, F16, F32, F32, F16]),
        (of_gpus_alone, [F32, F16, F32]),
        (data_parallel, [F16, F32]),
        (transformed, [F16, F32]),
    ],
)
def test_regions(program, expected):
    assert list(program()) == expected and product() is F32


def test_bfloat16_is_there_on_a_t4_too():
    virtualgpu.gpus(1, like="T4")
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    with torch.autocast("cuda", BF16):
        assert product() is BF16
        out = nn.LSTM(2, 2).cuda()(torch.rand(1, 1, 2, device="cuda", dtype=BF16))
        assert set(kinds(out)) == {BF16}  # no cuDNN for it


# -- casts are operations


def test_weights_are_cast_once():
    def casts_of(**options):
        with Seen() as seen, torch.autocast("cuda", **options):
            for _ in range(3):
                layer(x)
        return len(seen.casts)

    layer, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda")
    assert [casts_of(), casts_of()] == [3 + 2] * 2  # x each time, weight and bias once; forgotten in between
    assert casts_of(cache_enabled=False) == 9
    layer.requires_grad_(False)
    assert casts_of() == 9


def test_the_cache_lasts_until_the_outermost_exit(without_workspaces):
    layer, x = nn.Linear(256, 256, bias=False).cuda(), torch.rand(1, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), torch.autocast("cuda"):
        with torch.autocast("cuda"):
            layer(x)
        assert torch.cuda.memory_allocated() - before == 256 * 256 * 2
        with Seen() as seen:
            layer(x)
        assert len(seen.casts) == 1
        torch.clear_autocast_cache()
        assert torch.cuda.memory_allocated() == before
        layer(x)
    assert torch.cuda.memory_allocated() == before


def test_a_cast_made_without_gradients_still_has_them():
    weight, x = nn.Parameter(torch.rand(2, 2, device="cuda")), torch.rand(2, 2, device="cuda")
    with torch.autocast("cuda"):
        with torch.inference_mode():
            x @ weight
        with torch.no_grad():
            assert not (x @ weight).requires_grad
        out = x @ weight
    out.sum().backward()
    assert equal(weight.grad, x.half().sum(0, dtype=F32).half().float()[:, None].expand(2, 2))


def test_casts_take_time_and_memory_and_backward_has_those_of_gradients(without_workspaces):
    x, w = torch.rand(256, 256, device="cuda"), torch.rand(256, 256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with virtualgpu.recording() as spans, torch.autocast("cuda"):
        _out = x @ w
    assert [span.name for span in spans] == ["_to_copy", "_to_copy", "mm"]
    assert all(span.end > span.start for span in spans)
    assert torch.cuda.max_memory_allocated() - before == 3 * 2 * 256**2
    layer = nn.Linear(4, 4).cuda()
    with torch.autocast("cuda"):
        loss = layer(torch.rand(2, 4, device="cuda")).float().sum()
    with Seen() as seen:
        loss.backward()
    assert len(seen.casts) == 3 and "mm" in seen.names  # of the loss, the weight's and the bias's gradient
    assert kinds([layer.weight.grad, layer.bias.grad]) == [F32, F32]


def test_nothing_is_left_when_gpus_go():
    setter, scaler = torch.set_autocast_enabled, torch.amp.GradScaler._maybe_opt_step
    x = torch.rand(2, 2, device="cuda")
    entered = torch.autocast("cuda")
    entered.__enter__()
    assert (x @ x).dtype is F16
    virtualgpu.reset()
    assert lists._on.machine is None
    assert (x @ x).dtype is F32 and (x.half() @ x.half()).exp().dtype is F16  # a CPU tensor now
    assert torch._C._dispatch_tls_is_dispatch_key_included(lists.OURS) is False
    entered.__exit__(None, None, None)
    assert torch.set_autocast_enabled is not setter and torch.amp.GradScaler._maybe_opt_step is not scaler


# -- the scaler


def test_scaler_skips_a_step_with_infinite_gradients():
    def step(factor=1.0):
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x).float().sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=1)
    before = model.weight.detach().clone()
    step(1e6)  # beyond float16
    assert scaler.get_scale() == 512 and torch.equal(model.weight, before)
    step()
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
