"""Devices that C++ cannot tell: "cuda" where it asks for the current one, a bare number where it knows no CUDA, versions."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

import virtualgpu

np = pytest.importorskip("numpy")

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def gpus():
    return virtualgpu.gpus(2)


VALUES = {
    "tensor": lambda where: torch.tensor([1, 2], **where),
    "scalar": lambda where: torch.tensor(0, dtype=torch.long, **where),
    "complex": lambda where: torch.tensor(1 + 1j, **where),
    "numpy": lambda where: torch.tensor(np.ones(2), **where),
    "as_tensor": lambda where: torch.as_tensor([1.0], **where),
    "as_tensor of numpy": lambda where: torch.as_tensor(np.ones(2), **where),
    "asarray": lambda where: torch.asarray([1.0], **where),
    "scalar_tensor": lambda where: torch.scalar_tensor(1.0, **where),
    "coo": lambda where: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), **where),
    "csr": lambda where: torch.sparse_csr_tensor([0, 1, 1], [0], [1.0], (2, 2), **where),
    "ones": lambda where: torch.ones(2, **where),
    "fft": lambda where: torch.fft.fftfreq(3, **where),
}


def numbers(tensor) -> list:
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist()


@pytest.mark.parametrize("make", VALUES)
def test_cuda_is_the_current_gpu(make):
    cpu = VALUES[make]({})
    for here in (ZERO, ONE):
        torch.cuda.set_device(here)
        made = VALUES[make]({"device": "cuda"})
        with torch.device("cuda"):
            inside = VALUES[make]({})
        assert made.device == inside.device == here
        assert numbers(made) == numbers(inside) == numbers(cpu)
    assert VALUES[make]({"device": "cpu"}).device == cpu.device


@pytest.mark.parametrize("make", VALUES)
def test_a_number_is_a_gpu(make):
    assert VALUES[make]({"device": 1}).device == ONE
    torch.set_default_device(1)
    try:
        assert VALUES[make]({}).device == torch.get_default_device() == ONE
        assert nn.BatchNorm1d(2).num_batches_tracked.device == ONE
    finally:
        torch.set_default_device(None)


def test_numbers_wherever_a_device_may_be_given():
    x = torch.ones(2)
    moved = [
        x.to(1),
        x.to(device=1),
        x.to(1, torch.float16),
        x.cuda(1),
        x.new_ones(2, device=1),
        x.new_tensor(3, device=1),
    ]
    moved += [torch.zeros_like(x, device=1), torch.normal(0.0, 1.0, (2,), device=1), torch.rand(2, device=np.int64(1))]
    models = [
        nn.Linear(2, 2).to(1),
        nn.Linear(2, 2, device=1),
        nn.Linear(2, 2).to(1, torch.float16),
        nn.Linear(2, 2).cuda(1),
    ]
    models.append(nn.Linear(2, 2, device="meta").to_empty(device=1))
    moved += [model.weight for model in models]
    assert {tensor.device for tensor in moved} == {ONE}
    assert models[2].weight.dtype == moved[2].dtype == torch.float16
    assert torch.Generator(device=1).device == ONE and torch.cuda.memory_allocated(
        1
    ) > 0 == torch.cuda.memory_allocated(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device=2)


def test_torch_device_of_a_number():
    device = torch.device(1)
    assert device == ONE == torch.device("cuda", 1) == torch.device(type="cuda", index=1) == torch.device(device)
    assert (
        isinstance(device, torch.device) and not isinstance(1, torch.device) and issubclass(type(device), torch.device)
    )
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
    file = io.BytesIO()
    torch.save({"device": device, "x": torch.ones(2, device=device)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["device"] == loaded["x"].device == ONE
    for wrong in (-1, None, 1.5):
        with pytest.raises((RuntimeError, TypeError)):
            torch.device(wrong)


def test_gradients_of_what_was_made_sparse():
    x = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), device="cuda:1", requires_grad=True)
    assert x.is_leaf and x.requires_grad
    torch.sparse.sum(x).backward()
    assert x.grad.device == ONE and x.grad.to_dense().tolist() == [1, 0, 1]


def test_scripts_find_the_functions_that_stand_in():
    def add(x):
        return x + torch.ones(2, device=x.device) + torch.zeros_like(x)

    out = torch.jit.script(add)(torch.ones(2, device=ONE))
    assert out.device == ONE and out.tolist() == [2, 2]


def test_pytorchs_own_afterwards():
    during = torch.tensor, torch.device
    virtualgpu.reset()
    assert torch.tensor is torch._C._VariableFunctions.tensor and torch.device is type(ZERO)
    assert torch.tensor is not during[0]
    with torch.device("cpu"):
        assert torch.tensor(0).device.type == "cpu"


def test_versions_are_of_one_wheel():
    major, minor = map(int, torch.version.cuda.split("."))
    assert torch._C._cuda_getCompiledVersion() == 1000 * major + 10 * minor
    assert torch.cuda.nccl.version() >= (2, 28) and torch.backends.cudnn.version() >= 91000
    assert torch.backends.cudnn.is_available()
    with torch.backends.cudnn.flags(enabled=False, benchmark_limit=5):
        assert not torch.backends.cudnn.enabled


def test_fake_tensors_on_a_gpu_wake_no_driver():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, device=ONE)
    with FakeTensorMode() as mode:
        y = torch.ones(2, device=ONE) + mode.from_tensor(x)
    assert y.device == ONE and torch.func.linearize(torch.sin, x)[0].device == ONE


@pytest.mark.parametrize(("dims", "transposed"), list(itertools.product((2, 3), (False, True))))
def test_dry_convolutions_have_the_layouts_of_real_ones(dims, transposed):
    last = torch.channels_last if dims == 2 else torch.channels_last_3d

    def strides(formats):
        shapes = [(4, 6, *[7] * dims), ((6, 8) if transposed else (8, 6)) + (3,) * dims]
        x, weight = (
            torch.ones(shape, device=ONE).to(memory_format=last if at_end else torch.contiguous_format).requires_grad_()
            for shape, at_end in zip(shapes, formats, strict=False)
        )
        rest = [1] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, 1
        out = torch.convolution(x, weight, None, *rest)
        gradient = torch.ones(out.shape, device=ONE)
        gradients = torch.autograd.grad(out, (x, weight), gradient.to(memory_format=last) if formats[2] else gradient)
        return [tensor.stride() for tensor in (out, *gradients)]

    for formats in itertools.product((False, True), repeat=3):
        with virtualgpu.dry_run():
            dry = strides(formats)
        assert dry == strides(formats)


class Wrapped(torch.Tensor):
    """A wrapper subclass that tells nobody what it wraps, and takes its operations apart."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


def test_a_wrapper_says_the_device_that_it_was_told():
    before = torch.cuda.memory_allocated(1)
    wrapped = Wrapped(torch.ones(128, device="cuda:1"))
    assert torch.cuda.memory_allocated(1) == before + 512
    doubled = wrapped * 2
    assert wrapped.device == doubled.device == torch.device("cuda:1") and wrapped.is_cuda and wrapped.get_device() == 1
    moved = doubled.to("cuda:0")
    assert moved.device == moved.inner.device == torch.device("cuda:0") and moved.inner.tolist() == [2] * 128
    assert wrapped.cpu().device.type == "cpu" and not wrapped.is_cpu
    del wrapped, doubled
    assert torch.cuda.memory_allocated(1) == before
