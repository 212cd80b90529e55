# ruff: noqa: F403, F405
"""What comes by dispatch otherwise than usual: in inference mode, operations of one's own, forward mode, and batches of gradients."""

import ctypes

import pytest
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.nn.parallel._functions import Broadcast
from torch.utils._python_dispatch import TorchDispatchMode

from tests.virtualgpu.engine.tools import *

# -- torch.inference_mode: operations come by whole, not taken apart by autograd; places, numbers, bytes and time are the same

CALLS = table("""
    x.double()
    x.half().float()
    x.t().contiguous()
    F.linear(x, x, x[:, 0])
    x @ x
    F.conv2d(x[None, None], x[None, None, :3, :3])
    F.dropout(x, 0.5)
    torch.einsum("ij,kj->ik", x, x)
    F.layer_norm(x, x.shape[-1:])
    F.scaled_dot_product_attention(*[x[None, None]] * 3)
    F.cross_entropy(x, torch.arange(len(x), device=x.device))
    F.one_hot(x.long().abs(), 9)
    x.type_as(torch.ones(1, dtype=DOUBLE, device=x.device))
    x.new_tensor([1.0]) + torch.tensor(1.0, device=x.device) + torch.as_tensor([2.0], device=x.device)
    x[x > 0]
    nn.LSTM(6, 3, bidirectional=True).to(x.device)(x[None])[0]
    nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(0), nn.Linear(64, 5)).eval().to(x.device)(x[None, None])
""")


def run(call, device):
    torch.manual_seed(0)
    x = torch.randn(6, 6).to(device)
    torch.manual_seed(1)
    return eval(call, globals(), {"x": x})


@pytest.mark.parametrize("call", CALLS)
def test_in_inference_mode_as_without_gradients(gpus, call):
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), virtualgpu.recording() as spans:
            found = run(call, ONE)
            assert found.device == ONE and torch.equal(found.cpu(), run(call, CPU))
            del found
            torch.cuda.reset_peak_memory_stats(1)
            run(call, ONE)
            peak = torch.cuda.max_memory_allocated(1)
        seen.append((peak, [span.name for span in spans], [span.end - span.start for span in spans]))
    assert seen[0][:2] == seen[1][:2] and seen[0][2] == pytest.approx(seen[1][2])
    if call.startswith(("x.double", "x @ x", "F.conv2d", "F.linear")):
        with virtualgpu.dry_run(), torch.inference_mode():
            assert run(call, ONE).device == ONE


def test_in_inference_mode_places_are_checked(gpus):
    with torch.inference_mode():
        x = ones(2, 2)
        for line in (
            lambda: F.linear(x, torch.ones(2, 2)),
            lambda: x @ torch.ones(2, 2, device=ONE),
            lambda: x.to(ONE) + x,
        ):
            with pytest.raises(RuntimeError, match="same device"):
                line()
        assert x.to("cuda:1", HALF).device == ONE and x.cpu().device == CPU
        with pytest.raises(torch.OutOfMemoryError):
            F.linear(x.expand(1 << 20, 2, 2), x.repeat(1 << 18, 1))


def test_changing_a_shape_in_place_is_no_kernel(gpus):
    x = ones(2, 3)
    with virtualgpu.recording() as spans:
        x.t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1).detach_()
    assert not spans and x.shape == (2, 3) and x.device == ZERO


def test_flex_attention(gpus):
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16, device=ONE)
    out = flex_attention(q, q, q)
    assert out.device == ONE
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q), atol=1e-5, rtol=1e-4)


def test_what_cpp_makes_joins_its_call_below_other_modes(gpus):
    """Another dispatch mode holds what it passes on, as Python would."""

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            held = args  # noqa: F841
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device=ONE)
    with Passing(), Passing():
        assert torch.vander(x).device == ONE and torch.cov(torch.stack([x, x])).device == ONE
        assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4, device=ONE)] * 3, is_causal=True).device == ONE


# -- operations of one's own by torch.library: kernels in Python make tensors with `device=`, and those for the CPU find the CPU's

FACTORIES = table("""
    torch.tensor([1.0], device=x.device)
    torch.zeros(1, device=x.device) + 1
    torch.ones(1).to(x.device)
""")
EVERY, CPU_KEY, CUDA_KEY = "CompositeExplicitAutograd", "CPU", "CUDA"


@pytest.fixture
def define():
    """define(key=kernel, ...): an operation of one tensor, with a kernel for each dispatch key."""
    library, count = torch.library.Library("virtualgpu_test_own", "FRAGMENT"), iter(range(99))

    def add(**kernels):
        name = f"operation_{next(count)}"
        library.define(f"{name}(Tensor x) -> Tensor")
        for key, kernel in kernels.items():
            library.impl(name, kernel, key)
        add.last, add.library = name, library
        return getattr(torch.ops.virtualgpu_test_own, name)

    yield add
    library._destroy()


@pytest.mark.parametrize("key", [EVERY, "CompositeImplicitAutograd", CPU_KEY, CUDA_KEY])
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_kernel_makes_tensors_where_its_argument_is(gpus, define, key, factory):
    operation = define(**{key: lambda x: x + eval(factory, globals(), {"x": x})})
    found = operation(torch.ones(3, device=ONE))
    assert found.device == ONE and found.tolist() == [2, 2, 2]
    assert key == CUDA_KEY or operation(torch.ones(3)).device == CPU


def test_a_kernel_for_every_device_is_counted_as_the_operations_that_it_is_made_of(gpus, define):
    def kernel(x):
        torch.empty(1 << 20, device=x.device)
        return x * 2

    operation, x = define(CompositeExplicitAutograd=kernel), ones(4)
    assert used(lambda: operation(x))[1] == [512, 4 << 20]


def test_a_kernel_for_the_cpu_finds_the_cpus_tensors(gpus, define):
    """bitsandbytes hands their addresses to C, others their arrays to NumPy; on a GPU that kernel is not asked at all."""

    def kernel(x):
        y = torch.empty(x.shape, device=x.device)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        assert x.device.type == "cpu" and x.numpy().sum() == 6
        return y

    found = define(CPU=kernel)(torch.arange(4.0, device=ONE))
    assert found.device == ONE and found.tolist() == [0, 1, 2, 3]
    assert define(CPU=lambda x: torch.zeros(x.shape, device=ONE))(torch.ones(2)).device == ONE


def test_which_kernel_is_asked(gpus, define):
    """One for CUDA last: that is often C of its own, by an address of the GPU's memory. One that is registered later, too."""

    def broken(x):
        raise AssertionError

    x = torch.zeros(1, device=ONE)
    assert define(CUDA=broken, CompositeExplicitAutograd=lambda x: x + 1)(x).item() == 1
    assert define(CUDA=broken, CPU=lambda x: x + 1)(x).item() == 1
    operation = define()
    with pytest.raises(NotImplementedError):
        operation(x)
    define.library.impl(define.last, lambda x: x + torch.ones(1, device=x.device), "CUDA")
    assert operation(x).item() == 1


@pytest.mark.parametrize("devices", [None, "cpu", "cuda", ("cpu", "cuda")])
def test_custom_op_takes_the_kernel_that_there_is(gpus, devices):
    @torch.library.custom_op("virtualgpu_test_own::halves", mutates_args=(), device_types=devices)
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((1,), 0.5, device=x.device)

    found = halves(torch.ones(2, device=ONE))
    assert found.device == ONE and found.tolist() == [0.5, 0.5]


def test_in_a_dry_run_a_kernel_is_its_operations_or_what_its_fake_says(gpus, define):
    with virtualgpu.dry_run():
        x = ones(1 << 20)
        faked = define(CPU=lambda x: torch.from_numpy(x.numpy() * 2), Meta=torch.empty_like)
        whole = define(CompositeExplicitAutograd=lambda x: x + torch.zeros(1, device=x.device))
        for operation in (faked, whole):
            found, [held, _] = used(lambda operation=operation: operation(x))
            assert found.device == ZERO and held == 4 << 20


# -- derivatives across places


@pytest.mark.parametrize("source, target", HERE_AND_THERE, ids=str)
def test_a_tangent_goes_where_its_tensor_goes(gpus, source, target):
    """Copied into a tensor elsewhere, and by `to`: also of a tensor that requires no gradient, which is the common case."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 1, device=source), torch.full((2, 1), 5.0, device=source))
        there = torch.zeros(2, 1, device=target)
        there.copy_(dual)
        primal, tangent = forward_ad.unpack_dual(there)
        assert primal.device == target and primal.tolist() == [[1], [1]] and tangent.tolist() == [[5], [5]]
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                primal, tangent = forward_ad.unpack_dual(dual.to(target) * 3)
                assert primal.device == tangent.device == target
                assert primal.tolist() == [[3], [3]] and tangent.tolist() == [[15], [15]]
        assert forward_ad.unpack_dual(torch.ones(2, device=source).to(target)).tangent is None


@pytest.mark.parametrize("source, target", HERE_AND_THERE, ids=str)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_a_vectorized_jacobian_goes_through_a_copy(gpus, source, target, strategy):
    out = jacobian(lambda x: x.to(target) ** 2, torch.arange(3.0, device=source), vectorize=True, strategy=strategy)
    assert out.device == (source if strategy == "reverse-mode" else target)
    assert out.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 4]]


def test_batched_gradients_go_through_a_copy_and_back(gpus):
    x = torch.arange(3.0, device=ZERO, requires_grad=True)
    y = x.to(ONE) * torch.arange(3.0, device=ONE)
    (batch,) = torch.autograd.grad(y, x, torch.eye(3, device=ONE), is_grads_batched=True)
    assert batch.device == ZERO and batch.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 2]]


@pytest.mark.parametrize("dry", [False, True])
def test_an_unused_copy_of_a_broadcast(gpus, dry):
    """Its gradient is zeros, on its own GPU."""
    with perhaps_dry(dry):
        x = ones(2, learns=True)
        (Broadcast.apply([0, 1], x)[1] * 2).sum().backward()
        assert x.grad.device == ZERO and (dry or x.grad.tolist() == [2, 2])
