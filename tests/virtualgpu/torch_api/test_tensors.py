"""Tensors: on which device they are made and say to be, pinned memory, storages, the old types, what is drawn in a dry run."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import distributions, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn import functional as F

import virtualgpu

np = pytest.importorskip("numpy")

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")

# -- devices that C++ cannot tell: "cuda" where it asks for the current one, a bare number where it knows no CUDA

VALUES = {
    "tensor": lambda **where: torch.tensor([1, 2], **where),
    "scalar": lambda **where: torch.tensor(0, dtype=torch.long, **where),
    "complex": lambda **where: torch.tensor(1 + 1j, **where),
    "numpy": lambda **where: torch.tensor(np.ones(2), **where),
    "as_tensor": lambda **where: torch.as_tensor([1.0], **where),
    "as_tensor of numpy": lambda **where: torch.as_tensor(np.ones(2), **where),
    "asarray": lambda **where: torch.asarray([1.0], **where),
    "scalar_tensor": lambda **where: torch.scalar_tensor(1.0, **where),
    "coo": lambda **where: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), **where),
    "csr": lambda **where: torch.sparse_csr_tensor([0, 1, 1], [0], [1.0], (2, 2), **where),
    "ones": lambda **where: torch.ones(2, **where),
    "fft": lambda **where: torch.fft.fftfreq(3, **where),
}


def numbers(tensor) -> list:
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist()


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_cuda_is_the_current_gpu_and_a_number_is_a_gpu(gpus, make):
    cpu = make()
    for here in (ZERO, ONE):
        torch.cuda.set_device(here)
        made = make(device="cuda")
        with torch.device("cuda"):
            inside = make()
        assert made.device == inside.device == here
        assert numbers(made) == numbers(inside) == numbers(cpu)
    assert make(device="cpu").device == CPU
    torch.cuda.set_device(0)
    torch.set_default_device(1)
    try:
        assert make(device=1).device == make().device == torch.get_default_device() == ONE
        assert nn.BatchNorm1d(2).num_batches_tracked.device == ONE
    finally:
        torch.set_default_device(None)


def test_numbers_wherever_a_device_may_be_given(gpus):
    x, half = torch.ones(2), torch.float16
    moved = [x.to(1), x.to(device=1), x.to(1, half), x.cuda(1), x.new_ones(2, device=1), x.new_tensor(3, device=1)]
    moved += [torch.zeros_like(x, device=1), torch.normal(0.0, 1.0, (2,), device=1), torch.rand(2, device=np.int64(1))]
    models = [nn.Linear(2, 2).to(1), nn.Linear(2, 2, device=1), nn.Linear(2, 2).to(1, half), nn.Linear(2, 2).cuda(1)]
    models.append(nn.Linear(2, 2, device="meta").to_empty(device=1))
    moved += [model.weight for model in models]
    assert {tensor.device for tensor in moved} == {ONE}
    assert models[2].weight.dtype == moved[2].dtype == half
    assert torch.Generator(device=1).device == ONE
    assert torch.cuda.memory_allocated(1) > 0 == torch.cuda.memory_allocated(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device=2)


def test_torch_device_of_a_number(gpus):
    device = torch.device(1)
    assert device == ONE == torch.device("cuda", 1) == torch.device(type="cuda", index=1) == torch.device(device)
    assert isinstance(device, torch.device) and not isinstance(1, torch.device)
    assert issubclass(type(device), torch.device)
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
    file = io.BytesIO()
    torch.save({"device": device, "x": torch.ones(2, device=device)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["device"] == loaded["x"].device == ONE
    for wrong in (-1, None, 1.5):
        with pytest.raises((RuntimeError, TypeError)):
            torch.device(wrong)


def test_gradients_of_what_was_made_sparse(gpus):
    x = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), device="cuda:1", requires_grad=True)
    assert x.is_leaf and x.requires_grad
    torch.sparse.sum(x).backward()
    assert x.grad.device == ONE and x.grad.to_dense().tolist() == [1, 0, 1]


def test_pytorchs_own_afterwards(gpus):
    during = torch.tensor, torch.device
    virtualgpu.reset()
    assert torch.tensor is torch._C._VariableFunctions.tensor and torch.device is type(ZERO)
    assert torch.tensor is not during[0]
    with torch.device("cpu"):
        assert torch.tensor(0).device.type == "cpu"


def test_fake_tensors_on_a_gpu_wake_no_driver(gpus):
    x = torch.ones(2, device=ONE)
    with FakeTensorMode() as mode:
        y = torch.ones(2, device=ONE) + mode.from_tensor(x)
    assert y.device == ONE and torch.func.linearize(torch.sin, x)[0].device == ONE


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


def test_a_wrapper_says_the_device_that_it_was_told(gpus):
    before = torch.cuda.memory_allocated(1)
    wrapped = Wrapped(torch.ones(128, device="cuda:1"))
    assert torch.cuda.memory_allocated(1) == before + 512
    doubled = wrapped * 2
    assert wrapped.device == doubled.device == ONE and wrapped.is_cuda and wrapped.get_device() == 1
    moved = doubled.to("cuda:0")
    assert moved.device == moved.inner.device == ZERO and moved.inner.tolist() == [2] * 128
    assert wrapped.cpu().device.type == "cpu" and not wrapped.is_cpu
    del wrapped, doubled
    assert torch.cuda.memory_allocated(1) == before


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_dry_convolutions_have_the_layouts_of_real_ones(gpus, dims, transposed):
    last = torch.channels_last if dims == 2 else torch.channels_last_3d

    def strides(formats):
        shapes = [(4, 6, *[7] * dims), ((6, 8) if transposed else (8, 6)) + (3,) * dims]
        x, weight = (
            torch.ones(shape, device=ONE).to(memory_format=last if at_end else torch.contiguous_format).requires_grad_()
            for shape, at_end in zip(shapes, formats, strict=False)
        )
        out = torch.convolution(x, weight, None, [1] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, 1)
        gradient = torch.ones(out.shape, device=ONE)
        gradients = torch.autograd.grad(out, (x, weight), gradient.to(memory_format=last) if formats[2] else gradient)
        return [tensor.stride() for tensor in (out, *gradients)]

    for formats in itertools.product((False, True), repeat=3):
        with virtualgpu.dry_run():
            dry = strides(formats)
        assert dry == strides(formats)


# -- pinned memory, copies


PINNED = {
    "empty": lambda: torch.empty(2, pin_memory=True),
    "rand": lambda: torch.rand(2, pin_memory=True),
    "tensor": lambda: torch.tensor([1.0, 2.0], pin_memory=True),
    "full": lambda: torch.full((2,), 3.0, pin_memory=True),
    "arange": lambda: torch.arange(2.0, pin_memory=True),
    "empty_strided": lambda: torch.empty_strided((2,), (1,), pin_memory=True),
    "empty_like": lambda: torch.empty_like(torch.ones(2), pin_memory=True),
    "new_empty": lambda: torch.ones(2).new_empty(2, pin_memory=True),
    "pin_memory": lambda: torch.ones(2).pin_memory(),
    "storage": lambda: torch.empty(0).set_(torch.ones(2).untyped_storage().pin_memory(), 0, (2,)),
}


@pytest.mark.parametrize("make", PINNED.values(), ids=PINNED)
def test_pinned_tensors(gpus, make):
    made = make()
    assert made.is_pinned() and made.device == CPU and made.shape == (2,)
    assert made.view(1, 2).is_pinned() and not made.clone().is_pinned()
    copied = made.to("cuda:1", non_blocking=True)
    torch.cuda.synchronize()
    assert copied.device == ONE and torch.equal(copied.cpu(), made) and not copied.is_pinned()
    for attempt in (copied.pin_memory, lambda: torch.empty(2, device="cuda", pin_memory=True)):
        with pytest.raises(RuntimeError, match=r"(?i)only dense CPU tensors can be pinned"):
            attempt()


def test_pickles_and_copies_keep_the_place(gpus):
    x = torch.arange(3.0, device=ONE, requires_grad=True)
    for other in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        assert other.device == ONE and other.tolist() == [0, 1, 2] and other.requires_grad
    assert copy.deepcopy(nn.Linear(2, 2).to(ONE)).weight.device == ONE


# -- the old types


def test_constructors_of_the_old_types(gpus):
    made = torch.cuda.FloatTensor(2, 3)
    assert (made.device, made.shape, made.dtype) == (ZERO, (2, 3), torch.float32)
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1, 2] and torch.cuda.LongTensor([3]).dtype is torch.int64
    assert torch.cuda.HalfTensor(4).dtype is torch.float16 and torch.cuda.ByteTensor().shape == (0,)
    assert torch.cuda.FloatTensor(torch.Size([2, 2])).shape == (2, 2)
    with torch.cuda.device(1):
        assert torch.cuda.FloatTensor(3).device == ONE
    assert (made.zero_() + torch.ones(2, 3, device="cuda")).sum().item() == 6


def test_old_types_are_asked_for(gpus):
    x = torch.ones(2, device=ONE)
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.FloatTensor)
    assert not isinstance(x, torch.cuda.HalfTensor) and isinstance(x.half(), torch.cuda.HalfTensor)
    assert isinstance(x.cpu(), torch.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert x.type() == "torch.cuda.FloatTensor" and x.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
    assert x.type("torch.FloatTensor").device == CPU and x.cpu().type(torch.cuda.LongTensor).device == ZERO
    assert x.type(torch.cuda.DoubleTensor).device == ONE
    with virtualgpu.dry_run():  # torchvision's ToTensor asks whether it has a ByteTensor before it divides by 255
        x, image = torch.ones(2, device=ONE), torch.zeros(2, dtype=torch.uint8)
        assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.FloatTensor)
        assert isinstance(image, torch.ByteTensor) and isinstance(x.cpu(), torch.FloatTensor)
        assert not isinstance(image, (torch.FloatTensor, torch.cuda.ByteTensor))


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize(("kind", "dtype"), [("HalfTensor", torch.float16), ("DoubleTensor", torch.float64)])
def test_the_old_default_type(gpus, kind, dtype):
    torch.set_default_tensor_type(f"torch.cuda.{kind}" if kind == "HalfTensor" else getattr(torch.cuda, kind))
    try:
        made = [torch.zeros(2), torch.tensor([1.0]), nn.Linear(2, 2).weight, torch.rand(2)]
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert {(tensor.device, tensor.dtype) for tensor in made} == {(ZERO, dtype)}
    assert (torch.zeros(2).device, torch.zeros(2).dtype) == (CPU, torch.float32)


# -- torch.distributions: checked as ever with numbers; in a dry run the checks hold, and take as long


def log_prob(validate=None):
    normal = Independent(Normal(torch.zeros(4, 3, device="cuda"), torch.ones(4, 3, device="cuda"), validate), 1)
    actions = Categorical(logits=torch.zeros(4, 3, device="cuda"), validate_args=validate)
    divergence = kl_divergence(normal, normal)
    return normal.log_prob(normal.rsample()) + actions.log_prob(actions.sample()) + actions.entropy() + divergence


@pytest.mark.parametrize("validate", [None, True, False])
def test_a_dry_run_takes_the_checks_of_numbers_as_passed(gpus, validate):
    def seconds():
        torch.cuda.synchronize()
        start = gpus.clock.host
        assert log_prob(validate).shape == (4,)
        torch.cuda.synchronize()
        return gpus.clock.host - start

    seconds()
    numbers = seconds()
    with virtualgpu.dry_run():
        assert seconds() == pytest.approx(numbers)
    with pytest.raises(ValueError, match="satisfy the constraint"):  # torch._dynamo turns it off
        Normal(torch.zeros(2, device="cuda"), -torch.ones(2, device="cuda"), validate_args=True)


DRAWN = {"Beta": [1.0, 2.0], "Binomial": [3.0, 0.5], "Dirichlet": [(1.0, 2.0)], "Gamma": [1.0, 2.0], "Geometric": [0.5]}
DRAWN |= {"Poisson": [2.0], "StudentT": [3.0], "Uniform": [0.0, 1.0]}


@pytest.mark.parametrize(("name", "values"), DRAWN.items(), ids=DRAWN)
def test_what_is_drawn_has_a_shape_in_a_dry_run(gpus, name, values):
    with virtualgpu.dry_run():
        parameters = [torch.tensor([value] * 4, device="cuda") for value in values]
        distribution = getattr(distributions, name)(*parameters)
        sample = distribution.sample((5,))
        assert sample.shape == (5, *parameters[0].shape) and sample.device.type == "cuda"
        assert distribution.log_prob(sample).shape == (5, 4)


# -- dropout: CUDA's kernel, where the CPU has it too


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_has_the_numbers_of_the_cpu(gpus, p):
    found = []
    for device in ("cpu", "cuda"):
        x = torch.linspace(-1, 1, 999, device=device, requires_grad=True)
        torch.manual_seed(0)
        y = F.dropout(x, p)
        (y * y).sum().backward()
        found.append((y.detach().cpu(), x.grad.cpu()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dry", [False, True])
def test_dropout_keeps_one_byte_an_element(gpus, dry):
    size = 1 << 20
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        x = torch.zeros(size, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = nn.Dropout(0.5)(x)
        assert torch.cuda.memory_allocated() - before == (4 + 1) * size
        y.sum().backward()
        del y
        assert torch.cuda.memory_allocated() - before == 4 * size  # the gradient
