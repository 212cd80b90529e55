"""Virtual GPUs on a machine whose CUDA works. The real card is played here: PyTorch says that there is one, and some tensors lie on it."""

import io
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import virtualgpu
from virtualgpu import _compat
from virtualgpu.run import child, inherit

ONE = torch.device("cuda:1")
INTERFACE = "__cuda_array_interface__"
REFUSED = r"lies on the real cuda:0, which virtual GPUs hide: take it over by .cpu\(\) or .to"


@pytest.fixture
def driver(monkeypatch):
    """One card, as PyTorch knows it before virtual ones are on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def on_card(driver, monkeypatch):
    """What makes a tensor of 1, 2 and 3 on the card: memory of the CPU, of which PyTorch says otherwise, and copies by Tensor.to."""
    held, to, card = [], torch.Tensor.to, torch.device("cuda:0")
    device, device_of_storage = _compat.real_device, _compat.real_storage_device

    def holds(storage) -> bool:
        return storage._cdata in [one._cdata for one in held]

    def is_there(tensor) -> bool:
        return holds(tensor.untyped_storage())

    def make() -> torch.Tensor:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        held.append(tensor.untyped_storage())
        return tensor

    def copies(x, *args, **options):
        return to(x.clone() if is_there(x) else x, *args, **options)

    monkeypatch.setattr(_compat, "is_really_on_gpu", is_there)
    monkeypatch.setattr(_compat, "real_device", lambda x: card if is_there(x) else device(x))
    monkeypatch.setattr(_compat, "real_storage_device", lambda x: card if holds(x) else device_of_storage(x))
    monkeypatch.setattr(torch.Tensor, "to", copies)
    return make


# -- tensors that were there before


@pytest.mark.parametrize(
    "use",
    [
        lambda real: real + 1,
        lambda real: real[:2],
        lambda real: real + torch.ones(3, device=ONE),
        lambda real: torch.cat([torch.ones(2, device=ONE), real]),
        lambda real: torch.ones(3, device=ONE).copy_(real),
        lambda real: real.half(),
        lambda real: real.pin_memory(),
        lambda real: torch.zeros_like(real),
        lambda real: real.new_zeros(2),
        lambda real: torch.tensor(real),
        lambda real: torch.as_tensor(real, device=ONE),
        lambda real: torch.asarray(real),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_an_operation_with_a_real_ones_tensor_is_refused(on_card, use):
    real = on_card()
    virtualgpu.gpus(2)
    with pytest.raises(RuntimeError, match=REFUSED):
        use(real)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", ONE, torch.ones(1, dtype=torch.float64)])
def test_it_is_taken_over(on_card, device):
    real = on_card()
    virtualgpu.gpus(2)
    taken, is_tensor = real.to(device), isinstance(device, torch.Tensor)
    wanted = (device.device, torch.float64) if is_tensor else (torch.device(device), torch.float32)
    assert (taken.device, taken.dtype, taken.tolist()) == (*wanted, [1, 2, 3])
    assert not _compat.is_really_on_gpu(taken) and (taken + taken).tolist() == [2, 4, 6]


def test_by_cpu_and_cuda_and_with_its_gradient(on_card):
    real = on_card().requires_grad_()
    virtualgpu.gpus(2)
    taken = [real.cpu(), real.cuda(1), real.detach().cpu()]
    assert [tensor.device for tensor in taken] == [torch.device("cpu"), ONE, torch.device("cpu")]
    assert not any(_compat.is_really_on_gpu(tensor) for tensor in taken)
    taken[1].sum().backward()
    assert real.grad.tolist() == [1, 1, 1]


def test_it_is_read_and_saved_and_afterwards_as_before(on_card):
    """PyTorch reads memory at a storage's address after storage.cpu(), which gave the card's."""
    real, file = on_card(), io.BytesIO()
    with virtualgpu.gpus(2):
        assert (
            real.tolist() == [1, 2, 3] and "1., 2., 3." in repr(real) and real.numpy(force=True).tolist() == [1, 2, 3]
        )
        assert real.device == torch.device("cuda:0")
        assert not _compat.is_really_on_gpu(torch.empty(0).set_(real.untyped_storage().cpu()))
        torch.save(real, file)
        file.seek(0)
        assert torch.load(file, map_location=ONE).tolist() == [1, 2, 3]
    assert (real + 1).tolist() == [2, 3, 4] and torch.cuda.device_count() == 1


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.as_tensor(x),
        lambda x: torch.as_tensor(x.as_subclass(Plain)),
        lambda x: torch.autograd.grad((x * 2).exp().sum(), x)[0],
        lambda x: create_block_mask(lambda b, h, q, k: q >= k + x[0], None, None, 256, 256, device=ONE).kv_indices,
    ],
)
def test_under_a_default_device_a_virtual_ones_tensor_is_none_of_the_cards(driver, use):
    """There PyTorch's own getters ask what virtual GPUs have put in the place of Tensor's, and were told cuda of them."""
    virtualgpu.gpus(2)
    with torch.device(ONE):
        assert use(torch.ones(2, requires_grad=True)).device == ONE


def test_where_there_is_no_driver_nobody_looks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_compat, "is_really_on_gpu", None)
    virtualgpu.gpus(2)
    assert (torch.ones(2, device=ONE) + 1).tolist() == [2, 2] and torch.ones(2).to(ONE).device == ONE


def test_a_tensor_of_a_dry_run_after_it(driver):
    """PyTorch's meta kernels ask where it is. Told cuda:0, they made the result on the real one, of whatever was in its memory."""
    virtualgpu.gpus(2)
    with virtualgpu.dry_run():
        x = torch.ones(3, device=ONE)
        assert (x + 1).device == ONE
    for use in (lambda: x + 1, lambda: torch.ones(3, device=ONE) + x):
        with pytest.raises(RuntimeError, match="made in a dry run and has no values"):
            use()


def test_a_result_on_a_real_one_is_not_passed_on(on_card):
    real = on_card()
    torch.library.define("beside_real::leak", "(Tensor x) -> Tensor")
    torch.library.impl("beside_real::leak", "CPU", lambda x: real)
    virtualgpu.gpus(2)
    message = r"beside_real.leak.* made its result on a real GPU, which virtual ones hide"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.beside_real.leak(torch.ones(3))


# -- events, streams, generators


def test_events_streams_and_generators_of_before(driver):
    event, generator = torch.cuda.Event(), torch.Generator()
    stream = torch.Stream.__new__(torch.Stream, stream_id=0, device_index=0, device_type=1)
    virtualgpu.gpus(2)
    here, again = torch.cuda.current_stream(), "belongs to a real GPU, which virtual ones hide: make it again"
    for use, message in [
        (event.record, again),
        (event.wait, again),
        (lambda: here.wait_event(event), again),
        (lambda: here.wait_stream(stream), again),
        (lambda: torch.cuda.Event().record(stream), again),
        (
            lambda: torch.rand(2, device=ONE, generator=generator),
            "Expected a 'cuda' device type for generator but found 'cpu'",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            use()


# -- C++ asks the driver for GPUs that it does not have


def test_sparse_tensors_are_made_without_the_driver(driver, monkeypatch):
    asked, make = [], torch.sparse_coo_tensor
    asks = lambda *args, **options: asked.append(options) or make(*args, **options)  # noqa: E731
    monkeypatch.setattr(torch, "sparse_coo_tensor", asks)
    virtualgpu.gpus(2)
    made = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=ONE, check_invariants=True)
    assert made.device == ONE and made.to_dense().tolist() == [[0, 1], [2, 0]]
    assert "device" not in asked[0]


def test_a_fake_tensor_knows_the_real_alone(driver):
    virtualgpu.gpus(2)
    with FakeTensorMode():
        with pytest.raises(NotImplementedError, match="find 1 real GPU here, and no cuda:1: hide the real by"):
            torch.ones(2, device=ONE)
        assert torch.ones(2, device="cuda:0").device.index == 0


def test_no_kernel_of_another_library_is_told_an_address(driver):
    virtualgpu.gpus(2)
    with pytest.raises(AttributeError, match=r"cannot reach the memory of a virtual one: give them tensor.cpu\(\)"):
        getattr(torch.ones(2, device=ONE), INTERFACE)
    with pytest.raises(AttributeError, match="on non-CUDA tensor"):
        getattr(torch.ones(2), INTERFACE)


def test_scripts_know_what_they_made(driver):
    """Looking at an operation's tensors holds none of them: where Python holds one is told by its references."""

    def add(x):
        return x + torch.ones(2, device=x.device)

    virtualgpu.gpus(2)
    assert torch.jit.script(add)(torch.ones(2, device=ONE)).device == ONE


# -- which GPUs there are


@pytest.mark.parametrize(("works", "said"), [(True, "1 real GPU: "), (False, "1 virtual GPU, ")])
def test_a_card_whose_driver_is_too_old_does_not_count(monkeypatch, capsys, works, said):
    """NVIDIA's management library lists it all the same."""
    monkeypatch.delenv("HELPERS_GPUS")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    played = {
        "set_per_process_memory_fraction": None,
        "get_per_process_memory_fraction": 1.0,
        "get_device_name": "Tesla T4",
    }
    for name, answer in played.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    virtualgpu.gpus(1)
    assert said in capsys.readouterr().out


def test_a_limit_on_real_ones_ends_with_its_block(driver, monkeypatch):
    monkeypatch.delenv("HELPERS_GPUS")
    shares = {0: 1.0}
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: shares.update({index: share})
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", shares.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (15 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with virtualgpu.gpus(1, memory="8 GiB"):
        assert shares == {0: 0.5}
        with virtualgpu.gpus(1):
            assert shares == {0: 1.0}
        assert shares == {0: 0.5}
    assert shares == {0: 1.0}


def test_a_limit_that_no_real_card_has_is_a_virtual_ones(driver, monkeypatch, capsys):
    """Of lesson 06's 256 MiB cuBLAS took 65 on an H100, and a third of its cells ran out."""
    monkeypatch.delenv("HELPERS_GPUS")
    with virtualgpu.gpus(1, memory="256 MiB"):
        assert torch.cuda.get_device_properties(0).total_memory == 256 << 20
    assert "1 virtual GPU" in capsys.readouterr().out


@pytest.mark.parametrize("visible", [None, "0"])
def test_real_ones_are_hidden_from_cpp(monkeypatch, visible):
    """It counts once. The program's CUDA_VISIBLE_DEVICES is for virtual ones, and stays."""
    seen = []
    monkeypatch.setattr(
        _compat.C, "_cuda_getDeviceCount", lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]), raising=False
    )
    monkeypatch.setattr(_compat.internals, "built_with_cuda", True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _compat.hide_real_gpus()
    assert seen == [""] and os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    _compat.hide_real_gpus()
    assert seen == [""]


def test_by_the_runner_and_in_ranks_before_virtual_ones_are_on(monkeypatch):
    order = []
    monkeypatch.setattr(_compat, "hide_real_gpus", lambda: order.append("hidden"))
    monkeypatch.setattr(child, "activate", lambda *_: order.append("on"))
    monkeypatch.setattr(child.environment, "settings", lambda: child.environment.Settings((), False, None))
    monkeypatch.setattr(child, "_started", False)
    child.start()
    assert order == ["hidden", "on"]
    virtualgpu.gpus(2)
    inherit.import_state(inherit.export_state(dry=False))
    assert order == ["hidden", "on", "hidden"]
