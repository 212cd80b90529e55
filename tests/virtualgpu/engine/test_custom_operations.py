"""Operations of one's own by torch.library: kernels in Python make tensors with `device=`, and those for the CPU find the CPU's."""

import ctypes

import pytest
import torch

import virtualgpu

ONE = "cuda:1"
FACTORIES = {
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "zeros": lambda x: torch.zeros(1, device=x.device) + 1,
    "full": lambda x: torch.full((1,), 1.0, device=x.device),
    "arange": lambda x: torch.arange(1, 2, device=x.device),
    "empty": lambda x: torch.empty(1, device=x.device).fill_(1),
    "to": lambda x: torch.ones(1).to(x.device),
}


@pytest.fixture
def library():
    made = torch.library.Library("virtualgpu_test_own", "FRAGMENT")
    yield made
    made._destroy()


def define(library, name: str, **kernels):
    """The operation `name(x)`, with a kernel for each dispatch key."""
    library.define(f"{name}(Tensor x) -> Tensor")
    for key, kernel in kernels.items():
        library.impl(name, kernel, key)
    return getattr(torch.ops.virtualgpu_test_own, name)


@pytest.mark.parametrize("key", ["CompositeExplicitAutograd", "CompositeImplicitAutograd", "CPU", "CUDA"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_kernel_makes_tensors_where_its_argument_is(gpus, library, key, factory):
    operation = define(library, f"{factory}_{key}", **{key: lambda x: x + FACTORIES[factory](x)})
    found = operation(torch.ones(3, device=ONE))
    assert found.device == torch.device(ONE) and found.tolist() == [2, 2, 2]
    if key != "CUDA":
        assert operation(torch.ones(3)).device == torch.device("cpu")


def test_a_kernel_for_every_device_is_counted_as_the_operations_that_it_is_made_of(gpus, library):
    def kernel(x):
        torch.empty(1 << 20, device=x.device)
        return x * 2

    operation = define(library, "counted", CompositeExplicitAutograd=kernel)
    x = torch.ones(4, device=ONE)
    before = torch.cuda.memory_allocated(1)
    torch.cuda.reset_peak_memory_stats(1)
    operation(x)
    assert torch.cuda.max_memory_allocated(1) - before == 4 << 20


def test_a_kernel_for_the_cpu_finds_the_cpus_tensors(gpus, library):
    """bitsandbytes hands their addresses to C, others their arrays to NumPy; on a GPU that kernel is not asked at all."""

    def kernel(x):
        y = torch.empty(x.shape, device=x.device)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        assert x.device.type == "cpu" and x.numpy().sum() == 6
        return y

    found = define(library, "addresses", CPU=kernel)(torch.arange(4.0, device=ONE))
    assert found.device == torch.device(ONE) and found.tolist() == [0, 1, 2, 3]


def test_a_kernel_for_every_device_comes_before_one_for_cuda(gpus, library):
    """That one is often C of its own, by an address of the GPU's memory."""

    def broken(x):
        raise AssertionError

    operation = define(library, "before", CUDA=broken, CompositeExplicitAutograd=lambda x: x + 1)
    assert operation(torch.zeros(1, device=ONE)).item() == 1
    assert define(library, "cpu_before", CUDA=broken, CPU=lambda x: x + 1)(torch.zeros(1, device=ONE)).item() == 1


def test_a_kernel_that_is_registered_later_is_asked(gpus, library):
    operation = define(library, "later")
    with pytest.raises(NotImplementedError):
        operation(torch.ones(1, device=ONE))
    library.impl("later", lambda x: x + torch.ones(1, device=x.device), "CUDA")
    assert operation(torch.ones(1, device=ONE)).item() == 2


def test_a_kernel_for_the_cpu_makes_a_tensor_on_a_gpu(gpus, library):
    operation = define(library, "onto", CPU=lambda x: torch.zeros(x.shape, device=ONE))
    assert operation(torch.ones(2)).device == torch.device(ONE)


@pytest.mark.parametrize("devices", [None, "cpu", "cuda", ("cpu", "cuda")])
def test_custom_op_takes_the_kernel_that_there_is(gpus, devices):
    @torch.library.custom_op("virtualgpu_test_own::halves", mutates_args=(), device_types=devices)
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((1,), 0.5, device=x.device)

    found = halves(torch.ones(2, device=ONE))
    assert found.device == torch.device(ONE) and found.tolist() == [0.5, 0.5]


def test_in_a_dry_run_a_kernel_is_its_operations_or_what_its_fake_says(gpus, library):
    with virtualgpu.dry_run():
        x = torch.ones(1 << 20, device=ONE)
        known = define(library, "known", CPU=lambda x: torch.from_numpy(x.numpy() * 2), Meta=torch.empty_like)
        whole = define(library, "whole", CompositeExplicitAutograd=lambda x: x + torch.zeros(1, device=x.device))
        for operation in (known, whole):
            found = None
            before = torch.cuda.memory_allocated(1)
            found = operation(x)
            assert found.device == torch.device(ONE) and torch.cuda.memory_allocated(1) - before == 4 << 20
