"""Where autocast("cuda") is on and where not, its cache of weights, and its casts as operations with memory and time."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import virtualgpu
from tests.virtualgpu.torch_api.autocast_tools import BF16, F16, F32, Seen, autocast_gpus, equal, kinds, turn_on
from virtualgpu.torch_api import autocast as face


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    with autocast_gpus(monkeypatch) as off:
        yield off


def product(device="cuda"):
    x = torch.rand(2, 2, device=device)
    return (x @ x).dtype


def test_flags_are_pytorchs_own():
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", BF16):
        assert (
            torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
        )
        assert torch.get_autocast_dtype("cuda") is BF16 and product() is BF16
    assert not torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is F16 and product() is F32


def test_nested_regions():
    found = []
    with torch.autocast("cuda"):
        found.append(product())
        with torch.autocast("cuda", enabled=False):
            found.append(product())
            with torch.autocast("cuda", BF16):
                found.append(product())
            found.append(product())
        found.append(product())
    assert found == [F16, F32, BF16, F32, F16] and product() is F32


def test_other_ways_to_say_it():
    @torch.autocast("cuda", BF16)
    def decorated():
        return product()

    def generated():
        with torch.autocast("cuda"):
            yield product()
            yield product()

    assert decorated() is BF16 and product() is F32
    assert list(generated()) == [F16, F16] and product() is F32
    torch.set_autocast_enabled("cuda", True)
    assert product() is F16
    torch.set_autocast_enabled("cuda", False)
    assert product() is F32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.cuda.amp.autocast(dtype=BF16):
            assert product() is BF16
    with pytest.raises(ZeroDivisionError), torch.autocast("cuda"):
        _ = 1 / 0
    assert product() is F32


def test_each_thread_has_its_own():
    found = {}

    def work():
        found["none"] = product()
        with torch.autocast("cuda", BF16):
            found["own"] = product()

    with torch.autocast("cuda"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        found["here"] = product()
    assert found == {"none": F32, "own": BF16, "here": F16}


def test_data_parallel_takes_it_to_its_threads():
    model, x = nn.DataParallel(nn.Linear(4, 4).cuda(), [0, 1]), torch.rand(4, 4, device="cuda")
    with torch.autocast("cuda"):
        assert model(x).dtype is F16
    assert model(x).dtype is F32


def test_only_tensors_on_gpus_are_cast():
    with torch.autocast("cuda"):
        assert (product("cpu"), product("cuda:1")) == (F32, F16)
        x = torch.rand(3, device="cuda", dtype=F16)
        assert torch.pow(x, torch.tensor(2.0)).dtype is F32


def test_autocast_of_the_cpu_passes_by_gpus():
    half, x = torch.rand(2, 2, device="cuda").half(), torch.rand(2, 2, device="cuda")
    with torch.autocast("cpu"):
        assert (product("cpu"), product()) == (BF16, F32)
        assert kinds([torch.view_as_complex(half), F.mse_loss(half, half)]) == [torch.complex32, F16]
        assert torch.view_as_complex(half.cpu()).dtype is torch.complex64  # one of the CPU's list alone
        with torch.autocast("cuda"):
            assert (product("cpu"), product()) == (BF16, F16)
            assert kinds([F.cross_entropy(x, x), F.cross_entropy(half, half), torch.einsum("ij,kj", x, x)]) == [
                F32,
                F32,
                F16,
            ]
    assert (product("cpu"), product()) == (F32, F32)


def test_bfloat16_is_there_on_a_t4_too(gpus):
    gpus()
    off = turn_on("T4")
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    with torch.autocast("cuda", BF16):
        assert product() is BF16
        assert set(kinds(nn.LSTM(2, 2).cuda()(torch.rand(1, 1, 2, device="cuda", dtype=BF16)))) == {
            BF16
        }  # no cuDNN for it
    off()


def test_functions_of_ones_own():
    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=F32)
        def forward(ctx, x):
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return (gradient @ gradient) * 2

    class Inside(Doubled):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x):
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            found.append((gradient.float() @ gradient.float()).dtype)
            return gradient

    found = []
    x = torch.rand(2, 2, device="cuda", dtype=F16, requires_grad=True)
    with torch.autocast("cuda"):
        out, inside = Doubled.apply(x), Inside.apply(x)
    assert kinds([out, inside]) == [F32, F16]
    (out.sum() + inside.sum()).backward()
    assert found == [F16] and x.grad.dtype is F16


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again_in_the_same_dtype(reentrant):
    found = []

    def block(x):
        out = layer(x)
        found.append(out.dtype)
        return out.exp()

    layer, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda", requires_grad=True)
    with torch.autocast("cuda", BF16):
        out = checkpoint(block, x, use_reentrant=reentrant).sum()
    out.backward()
    plain = layer.weight.grad.clone()
    layer.zero_grad()
    with torch.autocast("cuda", BF16):
        block(x).sum().backward()
    assert found == [BF16] * 3 and equal(layer.weight.grad, plain) and not torch.is_autocast_enabled()


def test_transforms_of_functions():
    x, w = torch.rand(3, 2, device="cuda"), torch.rand(2, 2, device="cuda")
    with torch.autocast("cuda"):
        assert torch.func.vmap(lambda row: w @ row)(x).dtype is F16
        gradient = torch.func.grad(lambda w: (x @ w).float().sum())(w)
    assert gradient.dtype is F32
    half = torch.ones(3, 2).half()
    assert equal(gradient, (x.cpu().half().T @ half).float())


# -- casts are operations


def casts_of(layer, x, **options):
    with Seen() as seen, torch.autocast("cuda", **options):
        for _ in range(3):
            layer(x)
    return seen.names.count("_to_copy")


def test_weights_are_cast_once():
    layer, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda")
    assert casts_of(layer, x) == 3 + 2  # x each time, weight and bias once
    assert casts_of(layer, x) == 3 + 2  # forgotten in between
    assert casts_of(layer, x, cache_enabled=False) == 9
    assert casts_of(layer.requires_grad_(False), x) == 9


def test_the_cache_lasts_until_the_outermost_exit(without_workspaces):
    layer, x = nn.Linear(256, 256, bias=False).cuda(), torch.rand(1, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), torch.autocast("cuda"):
        with torch.autocast("cuda"):
            layer(x)
        assert torch.cuda.memory_allocated() - before == 256 * 256 * 2
        with Seen() as seen:
            layer(x)
        assert seen.names.count("_to_copy") == 1
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


def test_casts_take_time_and_memory(without_workspaces):
    x, w = torch.rand(256, 256, device="cuda"), torch.rand(256, 256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with virtualgpu.recording() as spans, torch.autocast("cuda"):
        _out = x @ w
    names = [span.name for span in spans]
    assert names == ["_to_copy", "_to_copy", "mm"] and all(span.end > span.start for span in spans)
    assert torch.cuda.max_memory_allocated() - before == 3 * 2 * 256**2


def test_backward_casts_no_more_than_gradients():
    layer, x = nn.Linear(4, 4).cuda(), torch.rand(2, 4, device="cuda")
    with torch.autocast("cuda"):
        loss = layer(x).float().sum()
    with Seen() as seen:
        loss.backward()
    assert seen.names.count("_to_copy") == 3 and "mm" in seen.names  # of the loss, the weight's and the bias's gradient
    assert kinds([layer.weight.grad, layer.bias.grad]) == [F32, F32]


# -- off again


def test_nothing_is_left_when_gpus_go(gpus):
    setter, scaler = torch.set_autocast_enabled, torch.amp.GradScaler._maybe_opt_step
    x = torch.rand(2, 2, device="cuda")
    entered = torch.autocast("cuda")
    entered.__enter__()
    assert (x @ x).dtype is F16
    gpus()
    assert face._on.machine is None
    assert (x @ x).dtype is F32 and (x.half() @ x.half()).exp().dtype is F16  # a CPU tensor now
    assert torch._C._dispatch_tls_is_dispatch_key_included(face.OURS) is False
    entered.__exit__(None, None, None)
    assert torch.set_autocast_enabled is not setter and torch.amp.GradScaler._maybe_opt_step is not scaler
