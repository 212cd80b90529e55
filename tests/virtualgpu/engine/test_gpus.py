# ruff: noqa: F403, F405
"""Virtual GPUs: on and off, what bad input meets, where tensors say they are, memory, and the face of a dry run."""

import copy  # noqa: F401
import gc
import io
import math
import threading
import warnings

import pytest

from tests.virtualgpu.engine.tools import *
from virtualgpu import _compat, session
from virtualgpu.engine.storage import Allocation
from virtualgpu.memory.blocks import Block

# -- on and off


def test_reset_puts_every_function_and_mode_back():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    packages = list(torch.serialization._package_registry)
    virtualgpu.gpus(2)
    places = [(owner, name) for owner, name, *_ in session._session.patches.replaced]
    virtualgpu.reset()
    before = [(owner, name, vars(owner).get(name, "absent")) for owner, name in places]
    assert len(before) > 100
    virtualgpu.gpus(2)
    assert len(_get_current_dispatch_mode_stack()) == 1
    assert all(vars(owner)[name] is not original for owner, name, original in before)
    for _ in range(2):  # a second time does nothing
        virtualgpu.reset()
        for owner, name, original in before:
            assert vars(owner).get(name, "absent") is original, f"{owner}.{name}"
    assert _get_current_dispatch_mode_stack() == [] and torch.serialization._package_registry == packages
    assert not torch.cuda.is_available() or torch.cuda.get_device_name(0) != "Tesla T4"


def test_tensors_survive_reset_as_cpu_tensors():
    with virtualgpu.gpus(2):
        x = torch.arange(3.0, device="cuda:1", requires_grad=True)
        y = (x.to("cuda:0") * 2).sum()
    y.backward()
    assert x.device.type == "cpu" and x.grad.tolist() == [2, 2, 2]


def test_asked_again_for_the_same_keeps_them_and_for_others_starts_afresh(capsys):
    virtualgpu.gpus(2)
    x = torch.ones(3, device=ONE)
    assert virtualgpu.gpus(2) == [ZERO, ONE] and torch.cuda.memory_allocated(1) == 512 and (x + 1).device == ONE
    assert capsys.readouterr().out.count("2 virtual GPUs, each like a Tesla T4 with 14.74 GiB") == 2
    virtualgpu.gpus(3, like="A100")
    assert torch.cuda.device_count() == 3 and torch.cuda.memory_allocated(1) == 0
    for call in (lambda: x + 1, x.cpu):
        with pytest.raises(RuntimeError, match=r"a later call of gpus.. replaced; make it again"):
            call()


BAD_INPUT = [
    *(({"n": n}, "ask for 1 to 64 GPUs") for n in (0, 65, -1, 2.0, "2", True, None)),
    *(
        ({"n": 1, "memory": memory}, r"memory=.*give bytes, or text like")
        for memory in ("a lot", "", "16 XB", "-1 GB", "1..5 GB", 0, -5, "1 KB", True, [16], math.nan)
    ),
    ({"n": 2, "like": "RTX"}, r"there is no GPU called 'RTX'.*T4, V100, A100, H100"),
]


@pytest.mark.parametrize("options, message", BAD_INPUT, ids=str)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        virtualgpu.gpus(**options)
    assert virtualgpu.machine() is None


def test_environment_chooses(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    if torch.cuda.device_count() < 8:
        with pytest.raises(RuntimeError, match="HELPERS_GPUS=real asks for 8 real GPUs, and PyTorch sees"):
            virtualgpu.gpus(8)
    monkeypatch.setenv("HELPERS_GPUS", "imaginary")
    with pytest.raises(ValueError, match="set it to virtual or real"):
        virtualgpu.gpus(2)


def test_real_gpus_where_there_are_enough(monkeypatch, capsys):
    """On a machine with GPUs, plain PyTorch, with the memory limit set; faked here."""
    monkeypatch.delenv("HELPERS_GPUS")
    limits = {}
    for name, fake in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_per_process_memory_fraction", lambda i: 1.0),
        ("get_device_name", lambda i: "NVIDIA L4"),
        ("mem_get_info", lambda i: (20 << 30, 24 << 30)),
        ("set_per_process_memory_fraction", lambda f, i: limits.update({i: f})),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    assert virtualgpu.gpus(2, memory="6 GB") == [ZERO, ONE]
    assert limits == {0: 0.25, 1: 0.25} and virtualgpu.machine() is None
    assert "2 real GPUs: NVIDIA L4, NVIDIA L4." in capsys.readouterr().out
    assert virtualgpu.gpus(3) and virtualgpu.machine() is not None  # too few real ones


# -- places

REPRS = table("""
    x | tensor([[0., 0., 0.],\\n        [0., 0., 0.]], device='cuda:1')
    torch.ones(1, dtype=HALF, device=0) | tensor([1.], device='cuda:0', dtype=torch.float16)
    torch.ones(1, device=0, requires_grad=True) * 2 | tensor([2.], device='cuda:0', grad_fn=<MulBackward0>)
    nn.Parameter(torch.ones(1).cuda()) | Parameter containing:\\ntensor([1.], device='cuda:0', requires_grad=True)
""")
THERE = table("""
    c.to("cuda:1")
    c.cuda(device="cuda:1")
    c.to(torch.ones(1, device=1))
    c.to("cuda:1", HALF)
    c.to("cuda:1", non_blocking=True, copy=True)
    c.type("torch.cuda.HalfTensor").to(1)
    torch.tensor([1.0], device=1)
    torch.rand(2, device="cuda:1")
    c.new_full((2,), 3, device="cuda:1")
    x.t()
    x[0]
    x.detach()
    x + 1
    copy.deepcopy(x)
""")


def test_where_tensors_say_they_are(gpus):
    names = {"x": torch.zeros(2, 3).to("cuda:1"), "c": torch.zeros(2)}
    x, c = names["x"], names["c"]
    assert x.device == ONE and x.is_cuda and not x.is_cpu and not x.is_meta and x.get_device() == 1
    assert x.type() == "torch.cuda.FloatTensor" and c.type() == "torch.FloatTensor"
    assert c.device == CPU and c.is_cpu and c.get_device() == -1
    assert [repr(eval(call, globals(), names)) for call, _ in REPRS] == [text.replace("\\n", "\n") for _, text in REPRS]
    assert {call: eval(call, globals(), names).device for call in THERE} == dict.fromkeys(THERE, ONE)
    assert c.to("cuda:1", HALF).dtype == HALF and x.to("cuda:1") is x and c.cpu() is c
    with torch.cuda.device(1):
        assert (
            c.cuda().device == ONE and torch.cuda.current_device() == 1 and torch.zeros(1, device="cuda").device == ONE
        )
    with ONE:
        assert torch.zeros(2).device == ONE and nn.Linear(2, 2).weight.device == ONE
    torch.set_default_device("cuda:1")
    try:
        assert torch.zeros(2).device == ONE and torch.zeros(2, device="cpu").device == CPU
    finally:
        torch.set_default_device(None)
    assert torch.cuda.current_device() == 0


def test_a_model_built_before_the_gpus_and_gradients_that_travel_back():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    virtualgpu.gpus(2)
    x = torch.ones(4, 3, device=ZERO, requires_grad=True)
    model.to("cuda:1")(x.to(ONE)).sum().backward()
    optimizer.step()
    assert model.weight.device == model.weight.grad.device == ONE and x.grad.device == ZERO


def test_threads_see_them_too_and_have_a_current_device_of_their_own(gpus):
    found = []
    torch.cuda.set_device(1)

    def work():
        x = torch.ones(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:1 and cuda:0!"):
            x + torch.ones(2, device="cuda:0")
        found.append(((x * 2).device, torch.cuda.current_device()))

    class Own(threading.Thread):
        def run(self):
            work()

    for thread in (threading.Thread(target=work), Own()):
        thread.start()
        thread.join()
    gc.collect()
    assert found == [(ONE, 0)] * 2 and torch.cuda.current_device() == 1 and torch.cuda.memory_allocated(1) == 0


def test_numpy_and_lists(gpus):
    pytest.importorskip("numpy")
    x = ones(2)
    for call in (x.numpy, x.__array__):
        with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu"):
            call()
    assert x.cpu().numpy().tolist() == x.tolist() == x.numpy(force=True).tolist() == [1, 1]


@pytest.mark.parametrize("call", table("""
    torch.cuda.CUDAGraph()
    torch.cuda.make_graphed_callables(nn.Linear(1, 1), ())
    torch.cuda.temperature()
    torch.cuda.Event(interprocess=True)
    torch.cuda.ExternalStream(12345)
    ones(2).untyped_storage()._share_cuda_()
"""))  # fmt: skip
def test_what_is_not_modelled_says_so(gpus, call):
    with pytest.raises(NotImplementedError, match="not modelled"):
        eval(call)


# -- memory


@pytest.mark.parametrize(
    ("card", "memory", "mib"), [("T4", None, 102), ("H100", None, 610), ("H100", "1 GB", 102), ("H100", "256 MB", 0)]
)
def test_a_context_takes_what_it_does_on_such_a_card(card, memory, mib):
    """nvidia-smi's figures: 102 MiB on a T4, and on an H100 610 once a first tensor was there (measured, 2026-11-26)."""
    virtualgpu.gpus(1, like=card, memory=memory)
    free, total = torch.cuda.mem_get_info()
    assert total - free == mib << 20


def test_interrupted_step_leaves_the_books_right(without_workspaces):
    """An exception, or Ctrl-C, in the middle of forward or backward: what is alive is counted, nothing else."""
    virtualgpu.gpus(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")
    before = torch.cuda.memory_allocated()

    def stop(*_):
        raise KeyboardInterrupt

    for register in (model[1].register_forward_hook, model[1].register_full_backward_hook):
        handle = register(stop)
        with pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
        handle.remove()
        model.zero_grad()
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    model(x).sum().backward()
    assert not virtualgpu.machine().local.bypass and torch.cuda.memory_allocated() == before + 2 * (64 * 64 * 4 + 512)


def test_five_hundred_steps_leave_no_trace(gpus, without_workspaces):
    """The bookkeeping stays bounded: what is allocated, what is reserved, and the objects that say so."""
    below, above = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 1).to("cuda:1")
    optimizer = torch.optim.SGD([*below.parameters(), *above.parameters()], lr=1e-3)

    def after(steps):
        for i in range(steps):
            optimizer.zero_grad()
            above(below(torch.ones(2 + i % 3, 4, device="cuda:0")).to("cuda:1")).sum().backward()
            optimizer.step()
        gc.collect()
        memories = [gpu.settled() for gpu in virtualgpu.machine().gpus]
        of_each = [(memory.allocated, memory.reserved, memory.statistics.retries) for memory in memories]
        return of_each, sum(type(o) in (Allocation, Block) for o in gc.get_objects())

    assert after(20) == after(500)


# -- dry runs


def test_dry_run_gives_shapes_places_and_bytes():
    pytest.importorskip("numpy")
    virtualgpu.gpus(2, memory="1 GB")
    with virtualgpu.dry_run(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.randn(1000, 1000, device="cuda:1")
        loss = (x @ x).mean()
        assert repr(x) == "tensor(..., device='cuda:1', size=(1000, 1000), dtype=torch.float32)"
        assert x.device == ONE and not x.is_meta and torch.zeros(2).device.type == "cpu"
        assert math.isnan(loss.item()) and (x > 0).any().item() is False and x.argmax().item() == 0
        assert math.isnan(torch.zeros(10_000).tolist()[0]) and torch.zeros(10_000).numpy().shape == (10_000,)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1 << 29, device="cuda:0")
    assert [str(w.message) for w in caught] == [
        "a dry run computes shapes, no values: what it reads is nan (0 for whole numbers, False for booleans, True for all()); here because "
        "the result of mean was not computed"
    ]
    assert torch.zeros(2).tolist() == [0, 0]


def test_dry_run_of_what_was_made_outside(gpus):
    model, x = nn.Linear(3, 2).to("cuda:1"), torch.randn(4, 3)
    before, count = model.weight.tolist(), torch.arange(3, device="cuda")
    with virtualgpu.dry_run():
        assert nn.Linear(3, 2).to("cuda:1")(x.to("cuda:1")).device == ONE  # data may come from outside
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"made outside dry_run.*Make the model inside, too"):
                model(x.to("cuda:1"))
        with torch.no_grad():
            assert model(x.to("cuda:1")).shape == (4, 2)
            model.weight.mul_(2)
            model.weight.copy_(torch.ones(2, 3))
            torch._foreach_add_([model.weight], 1)
            assert math.isnan(model.weight.tolist()[0][0])
            count += 1
            assert count.tolist() == [0, 0, 0]  # not known
    assert model.weight.tolist() == before and count.tolist() == [0, 1, 2] and model(x.to("cuda:1")).isfinite().all()


def test_dry_run_alone_and_gpus_inside():
    with virtualgpu.dry_run(3, like="H100"):
        assert torch.cuda.device_count() == 3 and torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(25, 10**9, device="cuda")  # a hundred gigabytes, on a machine that has none of it
        virtualgpu.gpus(2)
        assert _compat.is_really_meta(torch.zeros(1, device="cuda:1"))  # still dry
    assert virtualgpu.machine() is None


# -- the face of torch.cuda and GPUtil


def test_gputil_lists_them(gpus, capsys):
    GPUtil = pytest.importorskip("GPUtil")
    x = torch.randn(2000, 2000, device="cuda:1")
    x @ x
    first, second = GPUtil.getGPUs()
    assert (first.id, first.name, second.memoryTotal) == (0, "Tesla T4", 15095.0)
    assert first.load == 0 and 0.9 < second.load <= 1
    assert second.memoryUsed == first.memoryUsed + torch.cuda.memory_reserved(1) / MIB
    GPUtil.showUtilization()
    assert capsys.readouterr().out.splitlines()[-3:] == ["-" * 18, "|  0 |  0% |  1% |", "|  1 |  0% |  1% |"]
    assert GPUtil.getAvailable(limit=8) == [0, 1]


def test_what_lay_on_a_gpu_that_is_not_there_any_more(gpus):
    torch.save({"a": torch.ones(2, device="cuda:1")}, file := io.BytesIO())
    file.seek(0)
    virtualgpu.gpus(1)
    message = r"on CUDA device 1 but torch.cuda.device_count\(\) is 1. Please use torch.load with map_location"
    with pytest.raises(RuntimeError, match=message):
        torch.load(file)
