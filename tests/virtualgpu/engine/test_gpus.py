"""Virtual GPUs: on and off, places, errors in PyTorch's words, dry runs, and what bad input meets."""

import copy
import gc
import io
import math
import threading
import warnings

import pytest
import torch
from torch import nn

import virtualgpu
from virtualgpu import _compat, session
from virtualgpu.engine.storage import Allocation
from virtualgpu.memory.blocks import Block

MIB = 1 << 20


# -- on and off


def test_reset_puts_every_function_back():
    before = [(owner, name, vars(owner).get(name, "absent")) for owner, name in places()]
    assert len(before) > 100
    virtualgpu.gpus(2)
    assert all(vars(owner)[name] is not original for owner, name, original in before)
    virtualgpu.reset()
    for owner, name, original in before:
        assert vars(owner).get(name, "absent") is original, f"{owner}.{name}"
    assert not torch.cuda.is_available() or torch.cuda.get_device_name(0) != "Tesla T4"
    virtualgpu.reset()  # a second time does nothing


def places() -> list[tuple]:
    """What gpus() replaces."""
    virtualgpu.gpus(2)
    found = [(owner, name) for owner, name, *_ in session._session.patches.replaced]
    virtualgpu.reset()
    return found


def test_reset_leaves_no_mode_and_no_package():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    packages = list(torch.serialization._package_registry)
    with virtualgpu.gpus(2):
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert _get_current_dispatch_mode_stack() == [] and torch.serialization._package_registry == packages


def test_tensors_survive_reset_as_cpu_tensors():
    with virtualgpu.gpus(2):
        x = torch.arange(3.0, device="cuda:1", requires_grad=True)
        y = (x.to("cuda:0") * 2).sum()
    y.backward()
    assert x.device.type == "cpu" and x.grad.tolist() == [2, 2, 2]


def test_asked_again_for_the_same_keeps_them(capsys):
    virtualgpu.gpus(2)
    x = torch.ones(3, device="cuda:1")
    assert virtualgpu.gpus(2) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert torch.cuda.memory_allocated(1) == 512
    assert (x + 1).device == torch.device("cuda:1")
    assert capsys.readouterr().out.count("2 virtual GPUs, each like a Tesla T4 with 14.74 GiB") == 2


def test_asked_for_others_starts_afresh():
    virtualgpu.gpus(2)
    x = torch.ones(3, device="cuda:1")
    virtualgpu.gpus(3, like="A100")
    assert torch.cuda.device_count() == 3 and torch.cuda.memory_allocated(1) == 0
    with pytest.raises(RuntimeError, match=r"a later call of gpus.. replaced; make it again"):
        x + 1
    with pytest.raises(RuntimeError, match=r"a later call of gpus.. replaced; make it again"):
        x.cpu()


@pytest.mark.parametrize("n", [0, 65, -1, 2.0, "2", True, None])
def test_impossible_numbers_of_gpus(n):
    with pytest.raises(ValueError, match="ask for 1 to 64 GPUs"):
        virtualgpu.gpus(n)
    assert virtualgpu.machine() is None


def test_unknown_card():
    with pytest.raises(ValueError, match=r"there is no GPU called 'RTX'.*T4, V100, A100, H100"):
        virtualgpu.gpus(2, like="RTX")
    assert virtualgpu.machine() is None


@pytest.mark.parametrize(
    "memory, nbytes",
    [
        ("16 GB", 16 << 30),
        ("256MB", 256 << 20),
        ("1.5 GiB", 3 << 29),
        ("512 m", 512 << 20),
        (300_000_000, 300_000_000),
        (4e8, 400_000_000),
    ],
)
def test_memory_as_people_write_it(memory, nbytes):
    virtualgpu.gpus(1, memory=memory)
    assert torch.cuda.mem_get_info()[1] == nbytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("memory", ["a lot", "", "16 XB", "-1 GB", "1..5 GB", 0, -5, "1 KB", True, [16], float("nan")])
def test_invalid_memory_sizes(memory):
    with pytest.raises(ValueError, match=r"memory=.*give bytes, or text like"):
        virtualgpu.gpus(1, memory=memory)


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda i: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (20 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, i: limits.update({i: f}))
    assert virtualgpu.gpus(2, memory="6 GB") == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert limits == {0: 0.25, 1: 0.25} and virtualgpu.machine() is None
    assert "2 real GPUs: NVIDIA L4, NVIDIA L4." in capsys.readouterr().out
    assert virtualgpu.gpus(3) and virtualgpu.machine() is not None  # too few real ones


# -- places


def test_where_tensors_say_they_are():
    virtualgpu.gpus(2)
    x = torch.zeros(2, 3).to("cuda:1")
    assert x.device == torch.device("cuda:1") and x.is_cuda and not x.is_cpu and not x.is_meta and x.get_device() == 1
    assert (
        x.type() == "torch.cuda.FloatTensor"
        and repr(x) == "tensor([[0., 0., 0.],\n        [0., 0., 0.]], device='cuda:1')"
    )
    assert repr(torch.ones(1, dtype=torch.float16, device=0)) == "tensor([1.], device='cuda:0', dtype=torch.float16)"
    assert (
        repr(torch.ones(1, device=0, requires_grad=True) * 2) == "tensor([2.], device='cuda:0', grad_fn=<MulBackward0>)"
    )
    assert repr(nn.Parameter(torch.ones(1).cuda())).endswith("tensor([1.], device='cuda:0', requires_grad=True)")
    for other in (x.t(), x[0], x.detach(), x.clone(), x + 1, torch.zeros_like(x), x.new_zeros(2), copy.deepcopy(x)):
        assert other.device == x.device
    y = torch.zeros(2)
    assert y.device.type == "cpu" and y.is_cpu and y.get_device() == -1 and y.type() == "torch.FloatTensor"


def test_how_tensors_get_there():
    virtualgpu.gpus(2)
    x = torch.zeros(2)
    one = torch.device("cuda:1")
    places = [
        x.to("cuda:1"),
        x.to(one),
        x.to(1),
        x.to(device=one),
        x.cuda(1),
        x.cuda(device="cuda:1"),
        x.to(torch.ones(1, device=1)),
    ]
    places += [
        x.to("cuda:1", torch.float16),
        x.to("cuda:1", non_blocking=True, copy=True),
        x.type("torch.cuda.HalfTensor").to(1),
    ]
    places += [
        torch.tensor([1.0], device=1),
        torch.as_tensor([1.0], device=one),
        torch.rand(2, device="cuda:1"),
        torch.arange(3, device=1),
    ]
    places += [
        torch.zeros_like(x, device=1),
        x.new_full((2,), 3, device="cuda:1"),
        torch.as_tensor(x, device=1),
        torch.asarray([1], device=1),
    ]
    assert all(t.device == one for t in places)
    assert places[7].dtype == torch.float16
    with torch.cuda.device(1):
        assert (
            x.cuda().device == one and torch.cuda.current_device() == 1 and torch.zeros(1, device="cuda").device == one
        )
    with one:
        assert torch.zeros(2).device == one and nn.Linear(2, 2).weight.device == one
    torch.set_default_device("cuda:1")
    try:
        assert torch.zeros(2).device == one and torch.zeros(2, device="cpu").device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert places[0].to("cuda:1") is places[0] and places[0].cpu().device.type == "cpu" and x.cpu() is x
    assert torch.cuda.current_device() == 0


def test_a_model_built_before_the_gpus():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    virtualgpu.gpus(2)
    model.to("cuda:1")
    model(torch.randn(4, 3, device="cuda:1")).sum().backward()
    optimizer.step()
    assert model.weight.device == model.weight.grad.device == torch.device("cuda:1")


def test_gradients_travel_back():
    virtualgpu.gpus(2)
    x = torch.ones(3, device="cuda:0", requires_grad=True)
    x.to("cuda:1").square().sum().backward()
    assert x.grad.device == torch.device("cuda:0")


def test_threads_see_them_too():
    virtualgpu.gpus(2)
    found = []

    def work():
        x = torch.ones(2, device="cuda:1")
        try:
            x + torch.ones(2, device="cuda:0")
        except RuntimeError as error:
            found.append(str(error))
        found.append((x * 2).device)

    class Own(threading.Thread):
        def run(self):
            work()

    for thread in (threading.Thread(target=work), Own()):
        thread.start()
        thread.join()
    assert (
        found
        == [
            "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0!",
            torch.device("cuda:1"),
        ]
        * 2
    )
    gc.collect()
    assert torch.cuda.memory_allocated(1) == 0


def test_current_device_is_of_a_thread():
    virtualgpu.gpus(2)
    torch.cuda.set_device(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert seen == [0] and torch.cuda.current_device() == 1


# -- errors


def test_device_mismatch_in_pytorchs_words():
    virtualgpu.gpus(2)
    x, y = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1")
    both = "Expected all tensors to be on the same device, but "
    with pytest.raises(RuntimeError, match=f"^{both}found at least two devices, cuda:0 and cuda:1!"):
        x + y
    with pytest.raises(RuntimeError, match=f"^{both}found at least two devices, cuda:0 and cpu!"):
        x * torch.ones(2)
    with pytest.raises(
        RuntimeError,
        match=rf"^{both}got mat1 is on cuda:0, different from other tensors on cuda:1 .*wrapper_CUDA_addmm",
    ):
        nn.Linear(2, 2).to("cuda:1")(x)
    with pytest.raises(
        RuntimeError,
        match=rf"^{both}got tensors is on cuda:1, different from other tensors on cuda:0 .*wrapper_CUDA_cat",
    ):
        torch.cat([x, y])
    with pytest.raises(
        RuntimeError,
        match=r"^Input type \(torch.cuda.FloatTensor\) and weight type \(torch.FloatTensor\) should be the same",
    ):
        nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 2, 2, device="cuda"))
    assert (x + torch.tensor(1.0)).device == x.device  # a CPU tensor of no dimension may join in
    assert x[torch.tensor([0])].device == x.device  # and so may indices
    with pytest.raises(
        RuntimeError, match=r"^indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"
    ):
        torch.ones(2)[torch.tensor([0], device="cuda:1")]


def test_numpy_and_lists():
    pytest.importorskip("numpy")
    virtualgpu.gpus(1)
    x = torch.ones(2, device="cuda")
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu"):
        x.numpy()
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy"):
        memoryview(x.__array__())
    assert x.cpu().numpy().tolist() == x.tolist() == x.numpy(force=True).tolist() == [1, 1]


@pytest.mark.parametrize("place", ["cuda:2", 2, torch.device("cuda", 7)])
def test_a_gpu_that_is_not_there(place):
    virtualgpu.gpus(2)
    for attempt in (
        lambda: torch.zeros(1).to(place),
        lambda: torch.zeros(1, device=place),
        lambda: nn.Linear(1, 1).cuda(place),
    ):
        with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal") as caught:
            attempt()
        assert type(caught.value) is getattr(torch, "AcceleratorError", RuntimeError)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: torch.cuda.CUDAGraph(),
        lambda: torch.cuda.make_graphed_callables(nn.Linear(1, 1), ()),
        lambda: torch.cuda.temperature(),
        lambda: torch.cuda.Event(interprocess=True),
        lambda: torch.cuda.ExternalStream(12345),
        lambda: torch.ones(2, device="cuda").untyped_storage()._share_cuda_(),
    ],
)
def test_what_is_not_modelled_says_so(attempt):
    virtualgpu.gpus(2)
    with pytest.raises(NotImplementedError, match="not modelled"):
        attempt()


# -- memory


def test_out_of_memory():
    virtualgpu.gpus(1, memory="64 MB")
    kept = [torch.zeros(4 * MIB, device="cuda") for _ in range(3)]  # 16 MiB each
    with pytest.raises(torch.OutOfMemoryError) as caught:
        kept.append(torch.zeros(5 * MIB, device="cuda"))
    said = str(caught.value)
    assert said.startswith(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 16.00 MiB is free."
    )
    assert "48.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated" in said
    assert torch.cuda.memory_allocated() == 48 * MIB and torch.cuda.memory_stats()["num_ooms"] == 1
    kept.pop()
    kept.append(torch.zeros(5 * MIB, device="cuda"))  # what the cache held is given back first
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 2


def test_capacity_holds_for_every_operation():
    """Forward, backward, optimizer and copies all come up against it, and a failed one leaves nothing behind."""
    virtualgpu.gpus(2, memory="24 MB")
    x = torch.zeros(MIB, device="cuda:0", requires_grad=True)  # 4 MiB
    for attempt in (
        lambda: x.repeat(8),
        lambda: torch.stack([x] * 8),
        lambda: torch.zeros(8 * MIB).to("cuda:0"),
        lambda: x.expand(8, -1).to("cuda:1"),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
        assert torch.cuda.memory_allocated(0) == 4 * MIB and torch.cuda.memory_allocated(1) == 0


@pytest.mark.parametrize(
    ("card", "memory", "mib"), [("T4", None, 102), ("H100", None, 610), ("H100", "1 GB", 102), ("H100", "256 MB", 0)]
)
def test_a_context_takes_what_it_does_on_such_a_card(card, memory, mib):
    """nvidia-smi's figures: 102 MiB on a T4, and on an H100 610 once a first tensor was there (measured, 2026-11-26)."""
    virtualgpu.gpus(1, like=card, memory=memory)
    free, total = torch.cuda.mem_get_info()
    assert total - free == mib << 20


def test_memory_fraction():
    virtualgpu.gpus(1, memory="1 GB")
    torch.cuda.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError, match=r"512.00 MiB allowed; "):
        torch.zeros(140 * MIB, device="cuda")


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


def test_five_hundred_steps_leave_no_trace(without_workspaces):
    """The bookkeeping stays bounded: what is allocated, what is reserved, and the objects that say so."""
    virtualgpu.gpus(2)
    below, above = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 1).to("cuda:1")
    optimizer = torch.optim.SGD([*below.parameters(), *above.parameters()], lr=1e-3)

    def steps(n):
        for i in range(n):
            optimizer.zero_grad()
            above(below(torch.ones(2 + i % 3, 4, device="cuda:0")).to("cuda:1")).sum().backward()
            optimizer.step()

    def entries():
        gc.collect()
        machine = virtualgpu.machine()
        return (
            [g.settled().allocated for g in machine.gpus],
            [g.settled().reserved for g in machine.gpus],
            [gpu.settled().statistics.retries for gpu in machine.gpus],
            sum(type(o) in (Allocation, Block) for o in gc.get_objects()),
        )

    steps(20)
    before = entries()
    steps(500)
    assert entries() == before


# -- dry runs


def test_dry_run_gives_shapes_places_and_bytes():
    pytest.importorskip("numpy")
    virtualgpu.gpus(2, memory="1 GB")
    with virtualgpu.dry_run(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.randn(1000, 1000, device="cuda:1")
        loss = (x @ x).mean()
        assert repr(x) == "tensor(..., device='cuda:1', size=(1000, 1000), dtype=torch.float32)"
        assert x.device == torch.device("cuda:1") and not x.is_meta and torch.zeros(2).device.type == "cpu"
        assert loss.item() != loss.item() and (x > 0).any().item() is False and x.argmax().item() == 0
        assert torch.zeros(10_000).tolist()[0] != 0 and torch.zeros(10_000).numpy().shape == (10_000,)  # nan
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1 << 29, device="cuda:0")
    assert [str(w.message) for w in caught] == [
        "a dry run computes shapes, no values: what it reads is nan (0 for whole numbers, False for booleans, True for all()); here because "
        "the result of mean was not computed"
    ]
    assert torch.zeros(2).tolist() == [0, 0]


@pytest.mark.parametrize("read", [
    lambda x: x.tolist(),
    lambda x: x.sum().cpu().item(),
    lambda x: x.argmax(1).cpu().numpy(),
    lambda x: bool(x.sum().cpu() < 1),
])  # fmt: skip
def test_dry_run_says_that_it_has_no_values(read):
    """Where they are copied to the CPU first, too, as most programs do."""
    with virtualgpu.dry_run(1), pytest.warns(UserWarning, match="computes shapes, no values"):
        read(torch.rand(4, 3, device="cuda"))


def test_dry_run_of_what_was_made_outside():
    virtualgpu.gpus(2)
    model, x = nn.Linear(3, 2).to("cuda:1"), torch.randn(4, 3)
    with virtualgpu.dry_run():
        assert nn.Linear(3, 2).to("cuda:1")(x.to("cuda:1")).device == torch.device(
            "cuda:1"
        )  # data may come from outside
        with torch.no_grad():
            assert model(x.to("cuda:1")).shape == (4, 2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"made outside dry_run.*Make the model inside, too"):
                model(x.to("cuda:1"))
    assert model(x.to("cuda:1")).isfinite().all()


def test_dry_run_leaves_what_was_made_outside_as_it_was():
    virtualgpu.gpus(1)
    model, count = nn.Linear(3, 2).cuda(), torch.arange(3, device="cuda")
    before = model.weight.tolist()
    with virtualgpu.dry_run(), torch.no_grad():
        model.weight.mul_(2)
        model.weight.copy_(torch.ones(2, 3))
        torch._foreach_add_([model.weight], 1)
        assert math.isnan(model.weight.tolist()[0][0])
        count += 1
        assert count.tolist() == [0, 0, 0]  # not known
    assert model.weight.tolist() == before and count.tolist() == [0, 1, 2]


def test_dry_run_alone_and_gpus_inside():
    with virtualgpu.dry_run(3, like="H100"):
        assert torch.cuda.device_count() == 3 and torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
        virtualgpu.gpus(2)
        assert _compat.is_really_meta(torch.zeros(1, device="cuda:1"))  # still dry
    assert virtualgpu.machine() is None


def test_dry_run_needs_no_room():
    """A hundred gigabytes of parameters, on a machine that has none of it."""
    with virtualgpu.dry_run(1, like="H100"), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(25, 10**9, device="cuda")


@pytest.mark.parametrize(
    "attempt, said",
    [
        (lambda x: x[x > 0], "the shape of what index returns depends on values"),
        (lambda x: x.nonzero(), "the shape of what nonzero returns depends on values"),
        (lambda x: torch.save(x, io.BytesIO()), "no values to save"),
    ],
)
def test_what_a_dry_run_cannot_do_says_so(attempt, said):
    with virtualgpu.dry_run(), pytest.raises((NotImplementedError, RuntimeError), match=said):
        attempt(torch.rand(3, device="cuda"))


# -- the face of torch.cuda and GPUtil


def test_gputil_lists_them(capsys):
    GPUtil = pytest.importorskip("GPUtil")

    virtualgpu.gpus(2)
    x = torch.randn(2000, 2000, device="cuda:1")
    x @ x
    first, second = GPUtil.getGPUs()
    assert (first.id, first.name, second.memoryTotal) == (0, "Tesla T4", 15095.0)
    assert first.load == 0 and 0.9 < second.load <= 1
    assert second.memoryUsed == first.memoryUsed + torch.cuda.memory_reserved(1) / MIB
    GPUtil.showUtilization()
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "------------------",
        "|  0 |  0% |  1% |",
        "|  1 |  0% |  1% |",
    ]
    assert GPUtil.getAvailable(limit=8) == [0, 1]


def test_random_state_round_trip():
    virtualgpu.gpus(2)
    torch.manual_seed(1)
    state = torch.cuda.get_rng_state_all()
    first = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state_all(state)
    assert torch.equal(first, torch.randn(3, device="cuda"))
    torch.cuda.manual_seed_all(1)
    assert torch.equal(first, torch.randn(3, device="cuda"))


def test_what_lay_on_a_gpu_that_is_not_there_any_more():
    virtualgpu.gpus(2)
    file = io.BytesIO()
    torch.save({"a": torch.ones(2, device="cuda:1")}, file)
    file.seek(0)
    virtualgpu.gpus(1)
    with pytest.raises(
        RuntimeError,
        match=r"on CUDA device 1 but torch.cuda.device_count\(\) is 1. Please use torch.load with map_location",
    ):
        torch.load(file)
